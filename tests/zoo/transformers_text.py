"""transformers' models of text: decoders, encoders, encoder-decoders; dense, mixtures of experts and state spaces."""

from functools import partial
from typing import Any

from tests.zoo.model import Table
from tests.zoo.tiny_configs import built, pairs, words

TABLE = Table()

DECODERS = (
    *("gpt2", "llama", "mistral", "gemma", "gemma2", "gemma3_text", "falcon", "bloom", "mpt", "opt", "phi", "phi3"),
    *("codegen", "cohere", "cohere2", "ctrl", "biogpt", "bitnet", "apertus", "arcee", "diffllama", "doge", "cwm"),
    *("ernie4_5", "exaone4", "glm", "glm4", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "helium"),
    *("nemotron", "olmo", "olmo2", "olmo3", "openai-gpt", "persimmon", "qwen2", "qwen3", "seed_oss", "smollm3"),
    *("stablelm", "starcoder2", "xglm", "xlnet", "roformer", "nanochat", "minicpm3", "modernbert-decoder"),
    *("hunyuan_v1_dense", "lfm2", "ministral", "vaultgemma", "youtu"),
)
EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "gpt_oss", "phimoe"),
    *("jetmoe",),
    *("aria_text", "cohere2_moe", "ernie4_5_moe", "flex_olmo", "exaone_moe", "glm4_moe", "minimax", "minimax_m2"),
    *("deepseek_v3", "afmoe", "hunyuan_v1_moe", "lfm2_moe"),
)
STATE_SPACES = ("mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "rwkv", "qwen3_next", "jamba", "kimi_linear")
ENCODERS = (
    *("bert", "albert", "big_bird", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "esm"),
    *("eurobert",),
    *("flaubert", "fnet", "funnel", "ibert", "gte", "jina_embeddings_v3", "longformer", "megatron-bert"),
    *("mobilebert",),
    *("modernbert", "mpnet", "mra", "nomic_bert", "nystromformer", "rembert", "roberta", "roberta-prelayernorm"),
    *("squeezebert", "tapas", "xlm", "xlm-roberta-xl", "yoso"),
)
SEQUENCE_TO_SEQUENCE = (
    *("bart", "t5", "mt5", "umt5", "bigbird_pegasus", "blenderbot", "fsmt", "led", "longt5", "m2m_100", "marian"),
    *("mbart", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "switch_transformers"),
)

NEEDED: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
} | {name: {"num_key_value_heads": 4} for name in ("minicpm3", "youtu", "deepseek_v3")}

for _auto, _models, _batch in (
    ("AutoModelForCausalLM", DECODERS + EXPERTS + STATE_SPACES, words),
    ("AutoModelForMaskedLM", ENCODERS, words),
    ("AutoModelForSeq2SeqLM", SEQUENCE_TO_SEQUENCE, pairs),
):
    for _name in _models:
        TABLE.add(
            "transformers", f"transformers/{_name}", partial(built, _auto, _name, **NEEDED.get(_name, {})), _batch
        )
