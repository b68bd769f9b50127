/* The key of the inputs that a library was compiled from: jit_compiler.py defines AMP_GRAPH_KEY, includes this before
   any source, and loads only libraries with the expected key. */

#ifdef AMP_GRAPH_KEY
extern const char amp_graph_key[];
const char amp_graph_key[] = AMP_GRAPH_KEY;
#endif
