#!/usr/bin/env bash
# What a GPU is asked, in at most 8 minutes: correctness first, then speed at small sizes, then where the GPU is the
# bottleneck.
#
#     benchmarks/gpu/check.sh                    # all parts, one after the other
#     benchmarks/gpu/check.sh large compiled     # some of them
#
# Parts: correct (tests/cuda), large (the sizes people train), small
# (where the GPU waits for Python), compiled (through Inductor). Figures go to benchmarks/results/<name of the GPU>, or
# to $RESULTS, with the GPU's name and all versions.
# A part that takes too long is stopped; what it has measured by then is kept. A part run again replaces its figures.
# It uses the torch of $PYTHON (python3) and installs nothing: what is missing is named.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
GPU=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))') || {
    echo "check.sh: the torch of $PYTHON sees no GPU; fix: PYTHON=/path/to/python benchmarks/gpu/check.sh" >&2
    exit 1
}
RESULTS=${RESULTS:-benchmarks/results/$GPU}
mkdir -p "$RESULTS"

# The packages as they are installed, without pip: the folders passes/ and lists/ are amp_graph.passes and .lists.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir "$site/amp_graph"
ln -s "$PWD"/amp_graph/* "$PWD/passes" "$PWD/lists" "$site/amp_graph/"
export PYTHONSAFEPATH=1 PYTHONPATH="$site:$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export AMP_GRAPH_TRITON=${AMP_GRAPH_TRITON:-1} # off by default as long as no GPU has run them: "0" for figures without

speed() { # seconds, file, arguments of speed.py
    local limit=$1 output=$2
    shift 2
    timeout "$limit" "$PYTHON" benchmarks/speed.py --device cuda --modes training --output "$RESULTS/$output" "$@"
}

correct() { # each test is a line of the log: what was stopped shows what it had run
    timeout "${CORRECT_S:-170}" "$PYTHON" -m pytest tests/cuda -v --import-mode=append -p no:cacheprovider -n "${WORKERS:-12}" 2>&1 |
        tee "$RESULTS/correct.log" | grep -E "^(FAILED|ERROR|E  |=)" | tail -60
}

large() { # one process a model: what one leaves in the allocator is no other's
    for model in ${MODELS:-gpt2_medium bert_base resnet50_256 vit_base llama_block llama_1b diffusion_unet}; do
        speed "${MODEL_S:-45}" large --rounds 4 --models "$model" --variants "${VARIANTS:-amp_graph*}"
    done
}

small() {
    speed "${SMALL_S:-100}" small --rounds 5 --models "${MODELS:-mlp,gpt,bert_sdpa,resnet50,unet,lstm,vit,dlrm}" \
        --variants "${VARIANTS:-amp_graph,TrainStep,TrainStep cuda_graph}"
}

compiled() {
    speed "${COMPILED_S:-150}" compiled --rounds 5 --models "${MODELS:-resnet50,unet,bert_sdpa}" --cuda-graphs \
        --variants "${VARIANTS:-amp_graph,amp_graph + Inductor}"
}

echo "$GPU: $("$PYTHON" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)')"
for part in ${@:-correct large small compiled}; do
    case $part in
        correct | large | small | compiled) ;;
        *)
            echo "check.sh: no part is named $part; legal: correct, large, small, compiled" >&2
            exit 2
            ;;
    esac
    echo "== $part"
    started=$SECONDS
    "$part"
    echo "== $part: status $?, $((SECONDS - started)) s"
done
