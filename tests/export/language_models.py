"""BERT, GPT-2 and Llama of transformers, small and with random weights, as models of one tensor to one tensor."""

import torch

from tests.layers import layers


@layers(lambda model: dict(model=model))
def Logits(self, ids):
    """A model of transformers whose forward takes token numbers and returns the first output, without a cache."""
    options = {} if self.model.config.model_type == "bert" else {"use_cache": False}
    return self.model(input_ids=ids, return_dict=False, **options)[0]


def language_model(name):
    """Return ``bert``, ``gpt2`` or ``llama`` in evaluation, and token numbers; None if transformers is missing."""
    import transformers as t

    torch.manual_seed(0)
    size = dict(vocab_size=256, max_position_embeddings=64)
    layers = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    if name == "bert":
        model = t.BertModel(t.BertConfig(**size, **layers), add_pooling_layer=False)
    elif name == "gpt2":
        model = t.GPT2LMHeadModel(t.GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    else:
        model = t.LlamaForCausalLM(t.LlamaConfig(**size, **layers, num_key_value_heads=2))
    return Logits(model).eval(), torch.randint(0, 256, (2, 16))
