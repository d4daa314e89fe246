"""tiny-gpt-lab's default network for Hugging Face transformers: NanoChat and an embedding of token pairs.

Every exported directory has a copy of this file; transformers runs it with trust_remote_code=True.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import NanoChatConfig, NanoChatForCausalLM


class TinyGPTConfig(NanoChatConfig):
    """NanoChatConfig, and the rows of the table of token pairs."""

    model_type = "tiny_gpt"
    bigram_table_size: int = 16384


class TinyGPTForCausalLM(NanoChatForCausalLM):
    """NanoChatForCausalLM that adds to each token's embedding one of the token and its predecessor."""

    config_class = TinyGPTConfig

    def __init__(self, config: TinyGPTConfig):
        super().__init__(config)
        self.bigram_embedding = nn.Embedding(config.bigram_table_size, config.hidden_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        prev_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ):
        """NanoChatForCausalLM.forward: transformers reads the names of its arguments.

        prev_ids: (B,), the tokens before the first of input_ids; -1: there is none.
        """
        if input_ids is not None:
            kwargs["inputs_embeds"] = self.embed(input_ids, prev_ids, attention_mask)
        named = {"attention_mask": attention_mask, "position_ids": position_ids, "labels": labels}
        return super().forward(**named, logits_to_keep=logits_to_keep, **kwargs)

    def embed(self, ids: Tensor, prev_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """Embeddings of tokens and pairs. ids (B, T) -> (B, T, C)."""
        if prev_ids is None:
            previous = F.pad(ids[:, :-1], (1, 0), value=-1)  # (B, T)
        else:
            previous = torch.cat([prev_ids[:, None], ids[:, :-1]], dim=1)  # (B, T)
        if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[1] >= ids.shape[1]:
            padded = F.pad(attention_mask, (1, 0))[:, -ids.shape[1] - 1 : -1] == 0  # the token before is padding
            previous = previous.masked_fill(padded, -1)
        pairs = (previous * 40_503 ^ ids * 30_011) % self.config.bigram_table_size  # (B, T)
        return self.model.embed_tokens(ids) + self.bigram_embedding(pairs)

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args, **kwargs):
        """Adds prev_ids: with a KV cache only the newest tokens reach `forward`."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        new = inputs.get("input_ids")
        if new is not None and new.shape[1] < input_ids.shape[1]:
            inputs["prev_ids"] = input_ids[:, -new.shape[1] - 1]
        return inputs
