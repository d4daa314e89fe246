"""An exported directory is the same network and tokenizer to Hugging Face transformers, and to this project again."""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tiktoken
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from checkpoint.checkpoint import Checkpoint, load_checkpoint
from checkpoint.hugging_face.architectures import architecture_for
from checkpoint.hugging_face.tokenizer import tokenizer_json
from configs.compose import compose
from data.config import TokenizerConfig
from data.corpus import Corpus, find_files
from data.tokenizer import build_tokenizer, encode, format_merges, make_encoding
from model.gpt import GPT
from sampling.config import SamplingConfig
from sampling.sampler import generate
from system.errors import UserError
from tests.conftest import write_text

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SHAPES = {  # name -> (family, fields, model_type)
    "gpt2": ("gpt2", {}, "gpt2"),
    "gpt2 without biases and norm weights": (
        *("gpt2", {"bias": False, "norm_affine": False, "tied_embeddings": False, "mlp_hidden": 48}),
        "gpt2",
    ),
    "llama": ("llama", {}, "llama"),
    "llama with grouped heads": ("llama", {"num_kv_heads": 2, "bias": True, "tied_embeddings": True}, "llama"),
    "llama with another base": ("llama", {"rope_base": 500_000.0, "norm_affine": False, "norm_eps": 1e-6}, "llama"),
    "sliding window": ("llama", {"sliding_window": 7}, "mistral"),
    "some layers with a window": (
        *("llama", {"sliding_window": 7, "window_pattern": "SL", "num_kv_heads": 1}),
        "ministral",
    ),
    "nanochat": ("nanochat", {"num_kv_heads": 2}, "nanochat"),
    "nanochat without a soft cap": ("nanochat", {"logit_soft_cap": None, "tied_embeddings": True}, "nanochat"),
    "tiny": ("tiny", {}, "tiny_gpt"),
    "tiny with another table": ("tiny", {"bigram_table_size": 100, "logit_soft_cap": 10.0}, "tiny_gpt"),
}
ENCODINGS = ("byte", "bpe", "gpt2", "cl100k_base")
TEXTS = {
    "emoji": "👑 🧑‍🚀 family: 👨‍👩‍👧‍👦 and 🇫🇷" * 3,
    "Chinese": "漢字和かな 한국어, 「引用」。" * 3,
    "combining marks": "e\u0301 n\u0303o क्षि ก็ \u0301\u0301",
    "line ends": "a\r\nb\r\n\r\n c\n\n\n\td\r\r\n ",
    "spaces": " " * 5000,
    "spaces and a word": "x" + " " * 5000 + "y",
    "letters": "a" * 5000,
    "words": " ab" * 3000,
    "control characters": ("ab\x1c" * 3000) + "\x00\x1f\x85\xa0\u2028",
    "names of special tokens": "a<|endoftext|>b <|unused|><s></s>[PAD]<unk>",
    "contractions": "I'll've o'er DON'T '’s we’re",
    "numbers": "1234567 3.14 ½ ٣٤",
    "nothing": "",
}


def published_pattern(name: str) -> str:
    """The pattern of one of tiktoken's encodings, which would download its merges."""
    from tiktoken_ext import openai_public

    with pytest.MonkeyPatch.context() as patch:
        for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            patch.setattr(openai_public, loader, lambda *args, **kwargs: dict.fromkeys(range(50_256)))
        return getattr(openai_public, name)()["pat_str"]


def like_tiktoken(name: str, text: str) -> tiktoken.Encoding:
    """An encoding of 700 tokens with the pattern of a published one, and a special token."""
    import rustbpe

    pattern = published_pattern(name)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator([text], 700, pattern=pattern)
    ranks: dict[bytes, int] = {}
    for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda item: item[1]):
        ranks.setdefault(bytes(token), len(ranks))
    return make_encoding(name, pattern, ranks, {"<|endoftext|>": len(ranks)})


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(find_files(None), 0.1)


@pytest.fixture(scope="module")
def text(corpus) -> str:
    return "".join(corpus.train.read()) + "".join(corpus.val.read())


@pytest.fixture(scope="module")
def encodings(corpus, text, cache_dir) -> dict[str, tiktoken.Encoding]:
    bpe = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=1024), corpus.train, cache_dir)
    published = {name: like_tiktoken(name, text[:200_000]) for name in ("gpt2", "cl100k_base")}
    return {"byte": build_tokenizer(TokenizerConfig(kind="byte"), corpus.train, cache_dir), "bpe": bpe} | published


@pytest.fixture(scope="module", autouse=True)
def modules_cache(tmp_path_factory):
    """Where transformers copies the modeling file to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        yield


@dataclass(frozen=True)
class Exported:
    """A network and the directory it was exported to."""

    network: GPT
    tokenizer: tiktoken.Encoding
    path: Path
    trust: dict
    """What transformers needs to be told to load it."""


@pytest.fixture(scope="module")
def export(encodings, tmp_path_factory):
    """export(shape, encoding) is that directory, written once."""
    made = {}

    def exported(shape: str, encoding: str) -> Exported:
        if (shape, encoding) not in made:
            family, fields, _ = SHAPES[shape]
            tokenizer = encodings[encoding]
            sizes = {"vocab_size": tokenizer.n_vocab, "context_length": 256, "num_layers": 2, "num_heads": 4}
            config = replace(compose("train", [f"model={family}"]).model, **sizes | {"d_model": 32} | fields)
            torch.manual_seed(0)
            network = GPT(config).eval()
            for parameter in network.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            path = tmp_path_factory.mktemp("exported") / "model"
            checkpoint = Checkpoint(path, network, tokenizer, 7, {"nats_per_token": 1.25, "bits_per_byte": 2.5})
            checkpoint.export_directory(path, {"max_length": config.context_length}, {})
            trust = {"trust_remote_code": True} if family == "tiny" else {}
            made[shape, encoding] = Exported(network, tokenizer, path, trust)
        return made[shape, encoding]

    return exported


# The network


@pytest.mark.parametrize(
    "shape, encoding",
    [*((shape, "bpe") for shape in SHAPES), *((family, "byte") for family in ("gpt2", "llama", "nanochat", "tiny"))],
)
def test_transformers_computes_the_same_logits_and_greedy_tokens(export, shape, encoding):
    exported = export(shape, encoding)
    network, config = exported.network, exported.network.config
    assert architecture_for(config).model_type == SHAPES[shape][2]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported.path, **exported.trust).eval()
    ids = torch.randint(config.vocab_size, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert_close(theirs(ids).logits, network(ids), atol=1e-4, rtol=1e-4)
        generated = theirs.generate(ids[:1, :20], max_new_tokens=200, do_sample=False, max_length=None)[0, 20:]
    greedy = SamplingConfig(temperature=0, max_new_tokens=200)
    assert generated.tolist() == list(generate(network, ids[0, :20].tolist(), greedy))


def test_padding_on_the_left_does_not_change_what_a_row_of_a_batch_continues_with(export):
    exported = export("tiny", "bpe")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported.path, **exported.trust).eval()
    ids = torch.randint(exported.network.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids], dim=1)
    mask = (torch.arange(17) >= 5).long()[None]
    options = {"max_new_tokens": 20, "do_sample": False, "max_length": None, "pad_token_id": 0}
    alone = theirs.generate(ids, **options)[0, 12:]
    assert theirs.generate(padded, attention_mask=mask, **options)[0, 17:].tolist() == alone.tolist()


@pytest.mark.parametrize("shape", ["gpt2", "llama", "sliding window", "nanochat", "tiny"])
def test_pipeline_writes_what_sampling_writes(export, shape):
    exported = export(shape, "bpe")
    pipeline = transformers.pipeline("text-generation", str(exported.path), device="cpu", **exported.trust)
    written = pipeline("To be, or not", do_sample=False, max_new_tokens=20, max_length=None)[0]["generated_text"]
    ids = encode(exported.tokenizer, "To be, or not").tolist()
    ids += generate(exported.network, ids, SamplingConfig(temperature=0, max_new_tokens=20))
    assert written == exported.tokenizer.decode(ids)


@pytest.mark.parametrize("shape", SHAPES)
def test_directory_reads_back_as_the_same_bits_and_exports_to_the_same_files(export, tmp_path, shape):
    exported = export(shape, "bpe")
    read = load_checkpoint(exported.path)
    ours, theirs = exported.network.state_dict(), read.network.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    ids = torch.randint(1024, (1, 50), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert_close(read.network(ids), exported.network(ids), atol=1e-5, rtol=1e-5)
    read.export_directory(tmp_path / "again", {}, {})
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (exported.path / name).read_bytes(), name


@pytest.mark.parametrize(
    "family, fields, named",
    [
        ("gpt2", {"sliding_window": 4}, "model.sliding_window=4"),
        ("gpt2", {"num_kv_heads": 2}, "model.num_kv_heads=2"),
        ("gpt2", {"positions": "rope"}, "model.positions=rope"),
        ("gpt2", {"qk_norm": True}, "model.qk_norm=true"),
        ("llama", {"qk_norm": True}, "model.qk_norm=true"),
        ("llama", {"mlp": "relu2"}, "model.mlp=relu2"),
        ("llama", {"bias": True, "sliding_window": 4}, "model."),
        ("llama", {"logit_soft_cap": 15.0}, "model.logit_soft_cap=15.0"),
        ("nanochat", {"sliding_window": 4}, "model.sliding_window=4"),
        ("nanochat", {"norm_affine": True}, "model.norm_affine=true"),
        ("tiny", {"bias": True}, "model.bias=true"),
    ],
)
def test_what_no_architecture_has_is_rejected_by_name(tmp_path, encodings, family, fields, named):
    config = compose("train", [f"model={family}", "model.d_model=32", "model.num_heads=4"]).model
    config = replace(config, vocab_size=256, context_length=16, num_layers=1, bigram_table_size=None, **fields)
    if family == "tiny":
        config = replace(config, bigram_table_size=10)
    checkpoint = Checkpoint(tmp_path, GPT(config), encodings["byte"], 0, {"nats_per_token": 1.0, "bits_per_byte": 1.0})
    with pytest.raises(UserError) as error:
        checkpoint.export_directory(tmp_path / "model", {}, {})
    assert named in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "model").exists()


# The tokenizer


@pytest.fixture(scope="module")
def tokenizers(export):
    """Name -> (ours, theirs)."""

    def read(name):
        exported = export("gpt2", name)
        return exported.tokenizer, transformers.AutoTokenizer.from_pretrained(exported.path)

    return {name: read(name) for name in ENCODINGS}


def check_same(tokenizers, name: str, text: str) -> None:
    ours, theirs = tokenizers[name]
    ids = encode(ours, text).tolist()
    assert theirs.encode(text) == ids
    assert theirs.decode(ids) == text


@pytest.mark.parametrize("name", ENCODINGS)
def test_tokenizer_reads_back_as_the_same(export, name):
    exported = export("gpt2", name)
    again = load_checkpoint(exported.path).tokenizer
    assert format_merges(again._mergeable_ranks) == format_merges(exported.tokenizer._mergeable_ranks)
    assert all(encode(again, text).tolist() == encode(exported.tokenizer, text).tolist() for text in TEXTS.values())


@pytest.mark.parametrize("unusual", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_unusual_text_gets_the_same_ids(tokenizers, name, unusual):
    check_same(tokenizers, name, unusual)


@pytest.mark.parametrize("name", ENCODINGS)
def test_embedded_text_gets_the_same_ids(tokenizers, text, name):
    text = text if name == "bpe" else text[-300_000:]
    ours, theirs = tokenizers[name][0], tokenizers[name][1].backend_tokenizer
    ids = theirs.encode_batch_fast([text])[0].ids
    assert ids == encode(ours, text).tolist()
    assert theirs.decode(ids) == text


PIECES = ("\r\n", "  ", " \n", "\t", "👑", "漢字", "e\u0301", "<|endoftext|>", "'ll", " The", "123", "\x1c", "…", "’s")


@pytest.mark.parametrize("name", ENCODINGS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=12))
def test_any_text_gets_the_same_ids(tokenizers, name, pieces):
    check_same(tokenizers, name, "".join(pieces))


# Directories that transformers wrote


def from_transformers(path: Path, kind: str, text: str):
    """A random network of transformers, and a tokenizer as GPT-2's, learned by the tokenizers library."""
    import tokenizers

    learned = tokenizers.ByteLevelBPETokenizer()
    learned.train_from_iterator([text], vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
    learned.save(str(path / "tokenizer.json"))
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=600, n_positions=64, n_embd=32, n_layer=2, n_head=4)
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"vocab_size": 608, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= heads | {"max_position_embeddings": 64}
        family = {"llama": "Llama", "mistral": "Mistral", "nanochat": "NanoChat"}[kind]
        config = getattr(transformers, f"{family}Config")(**sizes)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.eval().save_pretrained(path)
    return model, learned


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "nanochat"])
def test_directory_that_transformers_wrote_is_the_same_network_and_tokenizer(tmp_path, text, kind):
    model, tokenizer = from_transformers(tmp_path, kind, text[:50_000])
    read = load_checkpoint(tmp_path)
    ids = torch.randint(600, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert_close(read.network(ids), model(ids).logits, atol=1e-4, rtol=1e-4)
    for name, unusual in TEXTS.items():
        if name != "names of special tokens":  # text for us
            assert encode(read.tokenizer, unusual).tolist() == tokenizer.encode(unusual).ids, name


# sample.py


@pytest.fixture
def exported_run(sample_here, tiny_run, tmp_path):
    finished = sample_here(f"checkpoint={tiny_run.dir}", f"export={tmp_path / 'model'}")
    assert finished.returncode == 0, finished
    return finished, tmp_path / "model"


def test_export_names_the_line_that_loads_it_and_its_card_has_the_figures(exported_run, tiny_run):
    finished, path = exported_run
    line = next(line for line in finished.stderr.splitlines() if line.startswith("generate = pipeline"))
    assert "trust_remote_code=True" in line and "model=nanochat" in line
    names = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in path.iterdir()} == names | {"README.md", "modeling_tiny_gpt.py"}
    card = (path / "README.md").read_text(encoding="utf-8")
    best = load_checkpoint(tiny_run.path)
    for figure in (
        *(f"{best.validation['bits_per_byte']:.3f} bits per byte", f"{best.network.num_parameters():,}"),
        *("words.txt", "bpe", "python train.py", "trainer.max_steps=40", "model.d_model=32", "trust_remote_code=True"),
    ):
        assert figure in card, figure
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation["temperature"] == 0.8 and generation["do_sample"] and generation["top_k"] == 0


def test_sampling_from_the_directory_writes_the_same_text(exported_run, sample_here, tiny_run):
    _, path = exported_run
    arguments = ("prompt=The king", "temperature=0", "max_new_tokens=12")
    again = sample_here(f"checkpoint={path}", *arguments)
    assert again.returncode == 0 and again.stdout
    assert again.stdout == sample_here(f"checkpoint={tiny_run.dir}", *arguments).stdout


def test_directory_with_other_files_is_not_written_into(sample_here, tiny_run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "has other files" in sample_here(f"checkpoint={tiny_run.dir}", f"export={tmp_path}").error
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# train.py

CPU = ("trainer.accelerator=cpu",)


def test_training_starts_from_a_directory_and_its_result_exports_again(
    export, train_here, sample_here, text_file, tmp_path
):
    exported = export("gpt2", "bpe")
    settings = ("trainer.max_steps=2", "model.context_length=16", "data.batch_size=4", "optimizer.lr=1e-4")
    run = train_here(f"init_from={exported.path}", f"data.corpus={text_file}", *settings, settings=CPU)
    assert run.returncode == 0, run.stderr
    trained = load_checkpoint(run.path)
    theirs = {"context_length": 16, "mlp_hidden": 128, "init": trained.network.config.init}
    assert trained.network.config == replace(exported.network.config, **theirs)
    old, new = exported.network.state_dict(), trained.network.state_dict()
    positions = "position_embedding.weight"
    assert_close(new[positions], old[positions][:16], atol=0.1, rtol=0)  # two steps of a small learning rate
    assert all((new[name] - tensor).abs().max() < 0.1 for name, tensor in old.items() if name != positions)
    assert not torch.equal(new["lm_head.weight"], old["lm_head.weight"])
    assert sample_here(f"checkpoint={run.dir}", f"export={tmp_path / 'again'}").returncode == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    ids = torch.arange(16)[None]
    with torch.inference_mode():
        assert_close(theirs(ids).logits, trained.network(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape, length", [("gpt2", 512), ("nanochat", 512)])
def test_longer_context_is_rejected_for_learned_positions_only(export, train_here, text_file, shape, length):
    exported = export(shape, "bpe")
    settings = (f"init_from={exported.path}", f"model.context_length={length}", "trainer.max_steps=1")
    run = train_here(*settings, f"data.corpus={text_file}", "data.batch_size=1", settings=CPU)
    if shape == "gpt2":
        assert f"model.context_length is {length}, in the checkpoint 256" in run.error
    else:
        assert run.returncode == 0, run.stderr
        assert load_checkpoint(run.path).network.config.context_length == length


def test_fine_tuning_recipe_takes_a_directory_with_unused_rows_and_exports_again(train_here, sample_here, tmp_path):
    """The embedding of a published network may have more rows than its tokenizer has tokens."""
    sizes = {"n_positions": 300, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 4000}
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    byte = make_encoding("byte", "(?s:.{1,64})", {bytes([number]): number for number in range(256)})
    (tmp_path / "gpt2" / "tokenizer.json").write_text(tokenizer_json(byte))
    settings = ("experiment=finetune_gpt2", f"init_from={tmp_path / 'gpt2'}", "trainer.max_steps=2")
    small = ("trainer.accumulate_grad_batches=2", "data.val_tokens=300", "num_validations=1")
    run = train_here(*settings, *small, settings=("data.corpus=" + str(write_text(tmp_path / "words.txt", 120)),))
    assert run.returncode == 0, run
    trained = load_checkpoint(run.path)
    assert trained.network.config.context_length == 256 and trained.network.config.vocab_size == 4000
    assert sample_here(f"checkpoint={run.path}", f"export={tmp_path / 'again'}/").returncode == 0
    again = load_checkpoint(tmp_path / "again").network.state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in trained.network.state_dict().items())
