"""Ask a model's rewritten graph a question that no table answers, with networkx."""

from itertools import pairwise

import networkx as nx
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import amp_graph


def longest_fp32_chain(graph: nx.DiGraph) -> list[str]:
    """Return the longest chain of operations in which each reads the one before, all computed in fp32."""
    told = graph.nodes
    full = [name for name in graph if (told[name]["kind"], told[name]["precision"]) == ("operation", "full")]
    return nx.dag_longest_path(graph.subgraph(full))


def between_matmuls(graph: nx.DiGraph) -> list[list[str]]:
    """Return, for each matrix product with another one before it, what lies on the shortest way from there."""
    matmuls = [name for name, told in graph.nodes.items() if told["flops"]]
    ways = []
    for target in matmuls:
        lengths = nx.single_source_shortest_path(graph.reverse(copy=False), target)
        way = min((lengths[name][::-1] for name in matmuls if name != target and name in lengths), key=len, default=[])
        if way:
            ways.append(way)
    return ways


def main() -> tuple[nx.DiGraph, list[str], list[list[str]]]:
    """Print both answers for a small GPT-2; return the graph with them."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=256, n_positions=32, bos_token_id=0, eos_token_id=0)
    model = amp_graph.convert(GPT2LMHeadModel(config), "bf16")
    tokens = torch.randint(0, 256, (2, 32))
    model(tokens, labels=tokens).loss.backward()  # a model is captured when it is called

    graph = amp_graph.report(model).to_networkx()
    told, chain, ways = graph.nodes, longest_fp32_chain(graph), between_matmuls(graph)
    print(f"the longest chain of fp32 operations has {len(chain)}:")
    for name in chain:
        print(f"  {told[name]['operation']:<24} {told[name]['module']:<24} {told[name]['reason']}")
    for way in ways:
        names = [told[name]["operation"].removeprefix("aten.") for name in way[1:-1]]
        casts = sum("cast" in graph.edges[edge] for edge in pairwise(way))
        print(f"{told[way[0]]['module']} -> {told[way[-1]]['module']}: {', '.join(names)}; {casts} casts")
    return graph, chain, ways


if __name__ == "__main__":
    main()
