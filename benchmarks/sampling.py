"""Speed of generation: tokens per second, relative to the matrix products alone and to Hugging Face's generate.

    python -m benchmarks.sampling

A GPT-2 with random weights, in float32 on the CPU. All alternate, one round each, after one round to warm up. Figures
are medians over the rounds. The last line is JSON.

    products   every matrix of the network times one vector per sample, and nothing else: with PyTorch's own product,
               with oneDNN, and with oneDNN and packed weights. The fastest is the limit.
    writing    greedy generation from one token up to the context; excludes building the decoder, once per model
    past       steps after the context is full, including refills
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.hugging_face import check_transformers_installed, hugging_face_gpt2
from checkpoint.checkpoint import NETWORK_PREFIX, checkpoint_metadata
from configs.arguments import check_no_arguments
from configs.entry_point import entry_point
from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from model.kernels.onednn import has_onednn, onednn_is_faster, onednn_linear
from model.layers import Linear
from sampling.config import SamplingConfig
from sampling.decoder import Decoder
from sampling.fast_copy import max_mv_numel, packed_linear_function
from sampling.kv_cache import BatchedKVCache, KVCache
from sampling.sampler import generate_batch
from sampling.text import CompletionStream
from system.machine import machine
from system.text import pluralize

BABY = GPTConfig(vocab_size=65, num_layers=6, num_heads=6, d_model=384, context_length=256)
SMALL = GPTConfig(vocab_size=1024)
ROUNDS, BATCH = 7, 64
FILTERS = SamplingConfig(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.1)
PROJECT = Path(__file__).parents[1]


def products(network: GPT, samples: int) -> dict[str, Callable[[], None]]:
    """Functions that multiply by every matrix of the network 20 times, one per library."""
    layers = [layer for layer in network.modules() if isinstance(layer, Linear)]
    ways = {"PyTorch's product": [partial(F.linear, weight=layer.weight) for layer in layers]}
    if has_onednn():
        ways["oneDNN"] = [partial(onednn_linear, weight=layer.weight) for layer in layers]
    if onednn_is_faster():
        ways["oneDNN, laid out"] = [packed_linear_function(layer, max_mv_numel(network)) for layer in layers]
    shape = [samples] if samples > 1 else []  # a single token's vector has one dimension, as in the decoder
    columns = [torch.randn(*shape, layer.in_features) for layer in layers]

    def once(way: list[Callable]) -> None:
        for _ in range(20):
            for product, x in zip(way, columns, strict=True):
                product(x)

    return {name: partial(once, way) for name, way in ways.items()}  # 20 tokens per sample


def generate(decoder: Decoder, samples: int, config: SamplingConfig) -> None:
    """Generates text; copies every token to the host."""
    for ids, _ in generate_batch(decoder, [0], config, range(samples)):
        ids.tolist()


def stream(decoder: Decoder, config: SamplingConfig) -> None:
    """Generates one sample like sample.py: every token is sampled, decoded, written and flushed."""
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), None, Path())
    with open(os.devnull, "w", encoding="utf-8") as out:
        text = CompletionStream(tokenizer, ["\n\n\n"])
        for ids, _ in generate_batch(decoder, [0], config, range(1)):
            print(text.push(ids.tolist()[0]), end="", file=out, flush=True)


@torch.inference_mode()
def step_seconds(network: GPT, begin: int, end: int) -> float:
    """Seconds per step while the text grows from `begin` to `end` tokens."""
    decoder = Decoder(network)
    ids = decoder.prefill(torch.zeros(1, 1, dtype=torch.long)).argmax(-1)
    for length in range(1, end):
        if length == begin:
            start = time.perf_counter()
        ids = decoder.step(ids).argmax(-1)
        ids.tolist()
    return (time.perf_counter() - start) / (end - begin)


def hugging_face(network: GPT) -> torch.nn.Module:
    """Hugging Face's GPT-2 with the same weights."""
    theirs = hugging_face_gpt2(network.config).eval()
    names = {"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f", "blocks": "h",
             "attention_norm": "ln_1", "attention.in_proj": "attn.c_attn", "attention.out_proj": "attn.c_proj",
             "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}  # fmt: skip
    weights = theirs.transformer.state_dict()
    for our_name, weight in network.state_dict().items():
        name = our_name
        for ours, their in names.items():
            name = name.replace(f"{ours}.", f"{their}.")
        if name != "lm_head.weight":  # tied
            weights[name].copy_(weight.T if name.startswith("h.") and weight.ndim == 2 else weight)
    return theirs


@torch.inference_mode()
def hf_generate(theirs: torch.nn.Module, num_tokens: int) -> torch.Tensor:
    """Greedy generation with Hugging Face's KV cache."""
    start = torch.zeros(1, 1, dtype=torch.long)
    return theirs.generate(start, attention_mask=start + 1, max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                           do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None)[0]  # fmt: skip


def tokens_per_second(runs: dict[str, tuple[Callable[[], None], int]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median tokens per second of each run, given as function and number of tokens; the runs alternate."""
    speeds = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, (run, tokens) in runs.items():
            start = time.perf_counter()
            run()
            if turn:  # the first warms up
                speeds[name].append(tokens / (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in speeds.items()}


@torch.inference_mode()
def attention_ms(config: GPTConfig, samples: int, filled: int) -> dict[str, float]:
    """Milliseconds of attention to `filled` tokens per sample in all layers of a step, with either KV cache."""
    H, D, ms = config.num_heads, config.head_dim, {}
    heads = torch.randn(samples, 3 * H, D)  # (B, H + 2G, D)
    for place in (KVCache, BatchedKVCache):
        layers = [place(heads, H, H, config.context_length) for _ in range(config.num_layers)]
        for kept in layers:
            kept.fill(*torch.randn(2, samples, H, filled, D))
        times = []
        for _ in range(20):
            start = time.perf_counter()
            for kept in layers:
                kept.step(heads, filled - 1, filled)
            times.append(1000 * (time.perf_counter() - start))
        ms[place.__name__] = round(statistics.median(times), 2)
    return ms


def seconds_to_first_character(network: GPT) -> tuple[float, float]:
    """Seconds until sample.py prints, and until a Python process has imported torch and loaded the same weights."""
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), None, Path())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.ckpt"
        weights = {NETWORK_PREFIX + name: weight for name, weight in network.state_dict().items()}
        entry = checkpoint_metadata(network.config, tokenizer, 0, {"nats_per_token": 0.0, "bits_per_byte": 0.0})
        torch.save({"gpt": entry, "state_dict": weights}, path)
        load = f"import configs.entry_point, torch; torch.load({str(path)!r}, weights_only=True)"
        ours, bare = [], []
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", load], cwd=PROJECT, check=True)
            bare.append(time.perf_counter() - start)
            start = time.perf_counter()
            command = [sys.executable, "sample.py", f"checkpoint={path}", "max_new_tokens=200", "temperature=0"]
            with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
                process.stdout.read(1)
                ours.append(time.perf_counter() - start)
                process.kill()
    return statistics.median(ours[1:]), statistics.median(bare[1:])


def main(arguments: list[str]) -> None:
    """Prints each comparison with its target, and one JSON line. Raises UserError without transformers."""
    check_no_arguments(arguments)
    check_transformers_installed()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    baby, longer, small = GPT(BABY), GPT(replace(BABY, context_length=8 * BABY.context_length)), GPT(SMALL)
    new = BABY.context_length - 1
    greedy = SamplingConfig(max_new_tokens=new, temperature=0)
    print(f"{baby.num_parameters():,} parameters, context {BABY.context_length}, "
          f"{pluralize(torch.get_num_threads(), 'thread')}; median of {ROUNDS} rounds or more in turn\n")  # fmt: skip
    result = {"benchmark": "sampling", "machine": machine(), "threads": torch.get_num_threads()}

    theirs, decoder = hugging_face(baby), Decoder(baby)
    for samples, rounds, aim in ((1, ROUNDS, 0.65), (BATCH, 2, 0.6)):
        with torch.inference_mode():
            runs = {f"products, {name}": (run, 20 * samples) for name, run in products(baby, samples).items()}
            runs["writing"] = (partial(generate, decoder, samples, greedy), new * samples)
            if samples == 1:
                runs["Hugging Face's generate"] = (partial(hf_generate, theirs, new), new)
            speeds = tokens_per_second(runs, rounds)
        ours, ways = speeds["writing"], {name: speed for name, speed in speeds.items() if name.startswith("products")}
        for name, speed in speeds.items():
            print(f"{samples:3} at once  {name:28} {speed:9,.0f} tokens/s   writing is {ours / speed:5.2f} of it")
        share = ours / max(ways.values())
        print(f"    of the fastest products {share:.2f}; aimed at: {aim}\n", flush=True)
        result |= {f"tokens_per_second_{samples}": round(ours), f"share_of_products_{samples}": round(share, 3),
                   f"products_{samples}": {name[10:]: round(speed) for name, speed in ways.items()}}  # fmt: skip
        if samples == 1:
            result["times_hugging_face"] = round(ours / speeds["Hugging Face's generate"], 2)
            same = hf_generate(theirs, new)[1:].tolist() == [
                int(ids[0]) for ids, _ in generate_batch(decoder, [0], greedy, range(1))
            ]
            print(f"    {result['times_hugging_face']} times Hugging Face's; aimed at: 2.5; the same text: {same}\n")

    result["attention_ms_64"] = ms = attention_ms(BABY, BATCH, BABY.context_length // 2)
    print(f"{BATCH} at once, attention to {BABY.context_length // 2} tokens each: "
          f"{ms['BatchedKVCache']:.1f} ms a step as sums of rows, "
          f"{ms['KVCache']:.1f} by PyTorch's fused attention\n")  # fmt: skip

    c = BABY.context_length
    spans = {"inside": (baby, 1, c), "past": (baby, c + 1, 3 * c + 1), "inside, context 8 times longer": (longer, 1, c),
             "up to that context": (longer, 1, 8 * c), "past that": (longer, 8 * c + 1, 12 * c + 1)}  # fmt: skip
    times = {name: [] for name in spans}
    for turn in range(5):
        for name, span in spans.items():
            seconds = step_seconds(*span)
            times[name] += [1000 * seconds] * bool(turn)
    ms = {name: statistics.median(each) for name, each in times.items()}
    for name, base in (("past", "inside"), ("inside, context 8 times longer", "inside"),
                       ("past that", "up to that context")):  # fmt: skip
        print(f"a step {name:32} {ms[name]:.3f} ms, {ms[name] / ms[base]:.2f} of one {base}; aimed at: 1.15")
    result["step_ms"] = {name: round(value, 3) for name, value in ms.items()}

    drawn = replace(FILTERS, max_new_tokens=new)
    speeds = tokens_per_second(
        {"bare": (partial(generate, decoder, 1, greedy), new), "all": (partial(stream, decoder, drawn), new)},
        3 * ROUNDS,
    )
    result["cost_of_filters_and_streaming"] = round(speeds["bare"] / speeds["all"] - 1, 3)
    print(
        f"\nall filters, drawing and streaming add "
        f"{result['cost_of_filters_and_streaming']:.1%} to a token; aimed at: 10%"
    )

    new, theirs = SMALL.context_length - 1, hugging_face(small)
    config = replace(greedy, max_new_tokens=new)
    speeds = tokens_per_second(
        {
            "ours": (partial(generate, Decoder(small), 1, config), new),
            "theirs": (partial(hf_generate, theirs, new), new),
        },
        10 * ROUNDS,  # they are short
    )
    result["small_times_hugging_face"] = round(speeds["ours"] / speeds["theirs"], 2)
    print(f"a small GPT-2, {small.num_parameters():,} parameters: {speeds['ours']:,.0f} tokens/s, "
          f"{result['small_times_hugging_face']} times Hugging Face's; aimed at: 5")  # fmt: skip

    ours, bare = seconds_to_first_character(baby)
    result |= {"first_character_s": round(ours, 2), "import_torch_and_weights_s": round(bare, 2)}
    print(
        f"first character after {ours:.2f} s, {ours / bare:.2f} of importing torch and reading the weights; "
        "aimed at: 1.5"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    entry_point(main)
