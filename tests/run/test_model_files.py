"""Models as users bring them: what is right is read bit for bit, and what is written loads again and is the model.

What is wrong is refused before a run starts (tests/preflight/test_refusals.py). Here it is loaded without these checks,
as a name on the Hub is, whose files come only then.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import launch, save_model
from helpers import load
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.data import arithmetic
from common.data.tokenizer import load_tokenizer
from common.errors import BadInput
from common.preflight import checks, folders
from common.run import checkpoint
from common.trainer import lora, model
from common.trainer.batching import Compute

EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"
WEIGHTS, CONFIG, DEFAULTS = "model.safetensors", "config.json", "generation_config.json"
TIED = {"tie_word_embeddings": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """The embedded architecture with one layer, and a head of its own."""
    config = arithmetic.config()
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    return Path(save_model(tmp_path_factory.mktemp("models") / "plain", config, 0.05))


def settings(file: str, **changes):
    """A change to a JSON file of a model, which need not be there."""

    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | changes))

    return change


def tensors(change):
    """A change to the dict of weights."""

    def edit(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, {"format": "pt"})

    return edit


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


def in_two_files(folder: Path) -> None:
    found = load_file(folder / WEIGHTS)
    places = {}
    for number, names in enumerate((sorted(found)[::2], sorted(found)[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: found[name] for name in names}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / WEIGHTS).unlink()


RIGHT = {
    "a head of its own": both(),
    "tied without a head": both(settings(CONFIG, **TIED), tensors(lambda found: found.pop(HEAD))),
    "tied with a copy": both(
        settings(CONFIG, **TIED), tensors(lambda found: found.update({HEAD: found[EMBEDDING].clone()}))
    ),
    "tied with the head alone": both(settings(CONFIG, **TIED), tensors(lambda found: found.pop(EMBEDDING))),
    "two files": in_two_files,
    "bfloat16": tensors(lambda found: found.update({name: part.bfloat16() for name, part in found.items()})),
    "a buffer of older versions": tensors(
        lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    ),
    "no sampling defaults": lambda folder: (folder / DEFAULTS).unlink(),
    "temperature alone": settings(DEFAULTS, temperature=0.7, top_p=0.8, eos_token_id=[1, 9]),
    "sampling defaults": settings(DEFAULTS, do_sample=True, temperature=0.7, top_k=20),
    "temperature in config.json": settings(CONFIG, temperature=0.5, top_p=0.9),
    "beams": settings(DEFAULTS, early_stopping=True, length_penalty=2.0),
}
WRONG = {
    "tied with another head": (settings(CONFIG, **TIED), (CONFIG, HEAD, "tie_word_embeddings")),
    "a weight is missing": (tensors(lambda found: found.pop(UP)), (UP,)),
    "the head is missing": (tensors(lambda found: found.pop(HEAD)), (HEAD,)),
    "another weight": (
        tensors(lambda found: found.update({"model.more.weight": torch.ones(3)})),
        ("model.more.weight",),
    ),
    "another shape": (tensors(lambda found: found.update({UP: torch.ones(7, 3)})), (UP, "7, 3")),
    "fp8": (settings(CONFIG, quantization_config=FP8), (CONFIG, "fp8")),
    "a method that nobody knows": (settings(CONFIG, quantization_config={"quant_method": "odd"}), (CONFIG, "odd")),
    "cut short": (lambda folder: (folder / WEIGHTS).write_bytes(b"\0" * 50), ("cannot be read",)),
}


def changed(plain: Path, folder: Path, change) -> Path:
    """A copy of the plain model, and then a change to it."""
    shutil.copytree(plain, folder)
    change(folder)
    return folder


def values(policy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().full_tensor().clone() for name, parameter in policy.named_parameters()}


def expected(start: Path) -> dict[str, torch.Tensor]:
    """The weights of the files themselves, in float32, by the names of parameters."""
    found = {}
    for file in start.glob("model*.safetensors"):
        found |= {name: part.float() for name, part in load_file(file).items() if "inv_freq" not in name}
    if json.loads((start / CONFIG).read_text())["tie_word_embeddings"]:
        embedding = found.pop(HEAD, None)
        found.setdefault(EMBEDDING, embedding)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train(policy) -> None:
    """Other weights than those of the start, and other adapters."""
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters()):
            if parameter.requires_grad:
                parameter.add_(0.01 * (number + 1))


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    read, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    return dict(read.named_parameters())


def defaults(folder: Path) -> bytes | None:
    path = folder / DEFAULTS
    return path.read_bytes() if path.is_file() else None


@pytest.mark.parametrize("name", RIGHT)
def test_a_model_that_is_right_is_read_as_it_is_and_exported_as_it_was_trained(name, plain, world, tmp_path):
    start = changed(plain, tmp_path / "start", RIGHT[name])
    ends = load_tokenizer(str(start))[1]
    checks.check_weights(str(start))
    policy = model.load(str(start), world, torch.float32)
    assert same(values(policy), expected(start))
    train(policy)
    checkpoint.export(policy, arithmetic.tokenizer(), tmp_path / "out", torch.float32, world)
    assert same(loaded(tmp_path / "out"), values(policy)) and not same(values(policy), expected(start))
    assert load_tokenizer(str(tmp_path / "out"))[1] == ends
    if defaults(start):
        assert defaults(tmp_path / "out") == defaults(start)
    checks.check_weights(str(tmp_path / "out"))  # another run can begin with it


def adapters_to(base: Path, folder: Path, world) -> Path:
    """Trained adapters to a model, as a run exports them."""
    policy = model.load(str(base), world, torch.float32, Compute(lora_rank=2))
    train(policy)
    checkpoint.export(policy, arithmetic.tokenizer(), folder, torch.float32, world)
    return folder


@pytest.mark.parametrize("name", RIGHT)
def test_a_merged_model_is_its_base_and_what_the_adapters_add(name, plain, world, tmp_path):
    base = changed(plain, tmp_path / "base", RIGHT[name])
    adapters = adapters_to(base, tmp_path / "adapters", world)
    merge = load("scripts/merge_lora.py")
    merge.main(merge.Args(adapters, tmp_path / "out", dtype="float32"))
    added = load_file(adapters / "adapter_model.safetensors")
    right = expected(base)
    for part in [part for part in added if ".lora_A." in part]:
        weight = part.removeprefix("base_model.model.").replace(".lora_A", "")
        right[weight] = right[weight] + lora.ALPHA / 2 * added[part.replace("lora_A", "lora_B")] @ added[part]
    found = loaded(tmp_path / "out")
    assert found.keys() == right.keys()
    assert all(torch.allclose(found[part], right[part], atol=1e-6) for part in right)
    assert load_tokenizer(str(tmp_path / "out"))[1] == load_tokenizer(str(base))[1]
    if defaults(base):
        assert defaults(tmp_path / "out") == defaults(base)


@pytest.mark.parametrize("name", WRONG)
def test_what_transformers_only_warns_of_is_refused_when_a_model_is_loaded(name, plain, world, tmp_path):
    change, named = WRONG[name]
    start = changed(plain, tmp_path / "start", change)
    with pytest.raises(BadInput) as refused:
        model.load(str(start), world, torch.float32)
    assert all(word in str(refused.value) for word in (str(start), *named))


@pytest.mark.parametrize("name", WRONG)
def test_adapters_are_not_merged_into_such_a_model(name, plain, world, tmp_path):
    adapters = adapters_to(plain, tmp_path / "adapters", world)
    change, named = WRONG[name]
    base = changed(plain, tmp_path / "base", change)
    before = set(tmp_path.iterdir())
    merge = load("scripts/merge_lora.py")
    with pytest.raises(BadInput) as refused:
        merge.main(merge.Args(adapters, tmp_path / "out", base=str(base)))
    assert all(word in str(refused.value) for word in ("--base", str(base), *named))
    assert set(tmp_path.iterdir()) == before


def test_a_value_head_that_is_missing_starts_at_zero(plain, world, tmp_path):
    """And a vocabulary's head that is left over is no mistake, be it tied or not."""
    for name in ("a head of its own", "tied without a head"):
        start = changed(plain, tmp_path / name, RIGHT[name])
        critic = values(model.load(str(start), world, torch.float32, value_head=True))
        assert not critic.pop("score.weight").any() and not critic.pop("score.bias").any()
        body = {part: tensor for part, tensor in expected(start).items() if part != HEAD}
        assert same(critic, body)


def test_all_ranks_refuse_what_rank_0_reads(plain, tmp_path):
    """The others do not wait for weights that never come."""
    start = changed(plain, tmp_path / "start", WRONG["a weight is missing"][0])
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom common import errors, placement\nfrom common.trainer import model\n\n"
        f"def main(path):\n    model.load(path, placement.init(0), torch.float32)\n\n"
        f"errors.launch(main, {str(start)!r})\n"
    )
    ended = launch(script, ranks=2, engine=False, check=False)
    assert ended.returncode == 2 and UP in ended.stderr


class Full(Exception):
    """The disk is full."""


def cut(*given, **named) -> None:
    raise Full


def state(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("there", [False, True])
def test_an_export_that_fails_leaves_what_was_there(there, plain, world, tmp_path, monkeypatch):
    policy = model.load(str(plain), world, torch.float32)
    home = tmp_path / "home"
    home.mkdir()
    if there:
        shutil.copytree(plain, home / "out")
    before = state(home)
    train(policy)
    tokenizer = arithmetic.tokenizer()
    monkeypatch.setattr(tokenizer, "save_pretrained", cut)  # the weights are written before
    with pytest.raises(Full):
        checkpoint.export(policy, tokenizer, home / "out", torch.float32, world)
    assert state(home) == before and (home / "out").exists() == there


def test_a_merge_that_fails_leaves_nothing(plain, world, tmp_path, monkeypatch):
    adapters = adapters_to(plain, tmp_path / "adapters", world)
    before = set(tmp_path.iterdir())
    merge = load("scripts/merge_lora.py")
    monkeypatch.setattr(merge.AutoTokenizer, "from_pretrained", cut)
    monkeypatch.setattr(merge, "load_tokenizer", lambda *given: None)
    with pytest.raises(Full):
        merge.main(merge.Args(adapters, tmp_path / "out"))
    assert set(tmp_path.iterdir()) == before


def test_an_export_into_a_folder_keeps_its_other_files_and_no_older_weights(plain, world, tmp_path, monkeypatch):
    """transformers would read old shards, or an old index, in place of the new file."""
    out = changed(plain, tmp_path / "out", in_two_files)
    (out / "notes.txt").write_text("mine")
    (out / ".unfinished").mkdir()
    (out / ".unfinished/half").write_text("of a run that was killed")
    policy = model.load(str(plain), world, torch.float32)
    train(policy)
    monkeypatch.chdir(out)
    for folder in (out, Path(".")):
        checkpoint.export(policy, arithmetic.tokenizer(), folder, torch.float32, world)
        assert same(loaded(out), values(policy))
        assert {path.name for path in out.glob("*model*")} == {WEIGHTS}
        assert (out / "notes.txt").read_text() == "mine" and not (out / ".unfinished").exists()


@pytest.mark.parametrize("kind", ["link", "name"])
def test_a_folder_gets_its_name_when_it_is_whole(kind, tmp_path):
    target = tmp_path / "deep/out"
    if kind == "link":
        (tmp_path / "disk").mkdir()
        (tmp_path / "deep").mkdir()
        target.symlink_to(tmp_path / "disk")
    with folders.written_whole(target) as unfinished:
        (unfinished / "a").write_text("1")
        assert not (target / "a").exists()
    assert (target / "a").read_text() == "1" and [path.name for path in target.iterdir()] == ["a"]
    assert target.is_symlink() == (kind == "link")
