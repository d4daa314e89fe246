"""Which key was meant by one that does not exist."""

import difflib
import re

from configs.defaults import known_keys
from training.config import RENAMED_KEYS
from training.trainer_options import SUPPORTED_OPTIONS

# What other projects and papers call our keys. A name is enough: its group, if given, may be wrong as well.
SYNONYMS = {
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("optim", "optimiser"), "optimizer"),
    **dict.fromkeys(("warmup", "warmup_iters", "warmup_steps", "warmup_ratio"), "optimizer.warmup_fraction"),
    **dict.fromkeys(("cooldown", "lr_decay_iters", "warmdown_ratio"), "optimizer.cooldown_fraction"),
    **dict.fromkeys(("max_iters", "iters", "steps", "num_steps", "num_iterations", "train_steps"), "trainer.max_steps"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "trainer.max_epochs"),
    **dict.fromkeys(("time", "minutes", "duration"), "budget"),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_grad_norm"), "trainer.gradient_clip_val"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum_steps", "grad_accum"), "trainer.accumulate_grad_batches"
    ),
    **dict.fromkeys(("eval_interval", "eval_every", "val_every"), "trainer.val_check_interval"),
    **dict.fromkeys(("log_interval", "log_every"), "trainer.log_every_n_steps"),
    **dict.fromkeys(("gpus", "num_gpus", "num_devices"), "trainer.devices"),
    **dict.fromkeys(("dtype", "amp", "fp16", "bf16"), "trainer.precision"),
    **dict.fromkeys(("n_head", "n_heads", "nhead", "heads", "num_attention_heads"), "model.num_heads"),
    **dict.fromkeys(("n_kv_head", "n_kv_heads", "kv_heads", "num_key_value_heads"), "model.num_kv_heads"),
    **dict.fromkeys(("n_layer", "n_layers", "layers", "depth", "num_hidden_layers"), "model.num_layers"),
    **dict.fromkeys(("n_embd", "n_embed", "embed_dim", "hidden_size", "dim", "width", "model_dim"), "model.d_model"),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner"), "model.mlp_hidden"),
    **dict.fromkeys(("rope_theta", "base"), "model.rope_base"),
    **dict.fromkeys(("tie_weights", "tie_word_embeddings"), "model.tied_embeddings"),
    **dict.fromkeys(("window", "window_size"), "model.sliding_window"),
    **dict.fromkeys(
        ("block_size", "seq_len", "max_seq_len", "sequence_len", "seq_length", "context", "n_ctx", "n_positions"),
        "model.context_length",
    ),
    **dict.fromkeys(("device_batch_size", "micro_batch_size", "train_batch_size", "bs"), "data.batch_size"),
    **dict.fromkeys(("dataset", "text", "text_file", "input_file", "data_dir"), "data.corpus"),
    **dict.fromkeys(("out_dir", "output_dir", "log_dir", "save_dir"), "runs_dir"),
    **dict.fromkeys(("resume_from", "resume_from_checkpoint", "ckpt_path"), "resume"),
    **dict.fromkeys(("random_seed", "manual_seed"), "seed"),
    **dict.fromkeys(("start", "input"), "prompt"),
    **dict.fromkeys(("max_tokens", "max_length", "num_tokens"), "max_new_tokens"),
    **dict.fromkeys(("num_return_sequences", "n_samples"), "num_samples"),
    **dict.fromkeys(("ckpt", "model_path", "weights"), "checkpoint"),
}
_NOT_SETTABLE = ("model.vocab_size",)


def explain_unknown_key(key: str, config_name: str) -> str:
    """One line that names the key that was probably meant."""
    known = known_keys(config_name)
    if key in known:
        group = key.rpartition(".")[0] or key
        return f"{key} cannot be set, because another setting removes {group}. Leave one of them out."
    if key in RENAMED_KEYS:
        letters = " Its letters are now S (sliding window) and L (all tokens)." if key.endswith("_pattern") else ""
        return f"{key} is now called {RENAMED_KEYS[key]}.{letters}"
    if match := re.match(r"hydra\.(launcher|sweeper)\.", key):
        plugin = {"launcher": "joblib", "sweeper": "optuna"}[match[1]]
        hint = f"If it is one of {plugin}, add hydra/{match[1]}={plugin}."
        return f"{key} is not a setting of the chosen {match[1]}. {hint}"
    near = similar_keys(key, known, config_name)
    fix = f"Did you mean {' or '.join(near)}?" if near else f"configs/{config_name}.yaml lists the keys."
    return f"{key} is an unknown key. {fix}"


def similar_keys(key: str, known: list[str], config_name: str) -> list[str]:
    """Keys with the same name in another group, else the name's synonym, else keys that are spelled alike."""
    if config_name == "train":
        known = [*known, *(f"trainer.{option}" for option in SUPPORTED_OPTIONS if f"trainer.{option}" not in known)]
    known = [each for each in known if each not in _NOT_SETTABLE]
    name = key.rpartition(".")[2].lower().replace("-", "_")
    if same_name := [each for each in known if each.rpartition(".")[2] == name]:
        return same_name
    if SYNONYMS.get(name) in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        return list(dict.fromkeys([*near, SYNONYMS[name]]))
    return difflib.get_close_matches(key, known, n=3)
