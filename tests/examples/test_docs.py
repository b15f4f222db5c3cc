"""The documentation builds without a warning, its code runs, and its tables say what the package does."""

import ast
import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorDataBase, TensorDict, is_leaf_nontensor, lazy_stack
from torchrl.data.llm import History

import rl_vllm
from rl_vllm import VLLMPolicy, errors
from rl_vllm.errors import BadInputError
from rl_vllm.policy import PolicyOptions
from rl_vllm.testing import FakeService
from rl_vllm.testing.models import TINY_VOCAB_SIZE, tiny_tokenizer

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PACKAGE = Path(rl_vllm.__file__).parent
PAGES = sorted(DOCS.glob("*.md"))


def table(page: str, first_column: str) -> list[dict[str, str]]:
    """Rows of the tables of a page whose first column has this name, by column name."""
    rows: list[dict[str, str]] = []
    columns: list[str] | None = None
    for line in (DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            columns = None
        elif columns is None:
            columns = cells
        elif columns[0] == first_column and set(line) - set("|-"):
            rows.append(dict(zip(columns, cells, strict=True)))
    return rows


KEYS = table("keys.md", "Key")
READ = [row for row in KEYS if "Read in mode" in row]
WRITTEN = [row for row in KEYS if "Written" in row]


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row["Key"].strip("`").split("."))


def leaves(td) -> set[tuple[str, ...]]:
    """All keys of a tensordict; a chat counts as one value, because its own keys are TorchRL's."""
    keys = td.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    return {(key,) if isinstance(key, str) else tuple(key[:2]) for key in keys}


def dtype_name(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, History):
        return "History"
    assert isinstance(value, NonTensorDataBase), value
    return type(value.data).__name__


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def service(tokenizer) -> FakeService:
    info = FakeService().model_info()
    return FakeService(
        info=replace(
            info,
            vocab_size=TINY_VOCAB_SIZE,
            max_model_len=256,
            eos_token_ids=(tokenizer.eos_token_id,),
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def prompts(mode: str):
    """Two prompts of different length, in every form of input."""
    if mode == "tokens":
        return lazy_stack([TensorDict(tokens=TensorDict(prompt=torch.tensor(ids))) for ids in ([5, 6, 7], [8])])
    if mode == "text":
        return TensorDict(text=TensorDict(prompt=["one two three", "four"], batch_size=2), batch_size=2)
    chats = History.from_chats([[{"role": "user", "content": text}] for text in ("one two three", "four")])
    return TensorDict(history=TensorDict(prompt=chats, batch_size=2), batch_size=2)


CASES = [
    *itertools.product(("tokens", "text", "history"), (False, True), (None, 3), (True, False), (False, True)),
]


@pytest.mark.parametrize(("mode", "with_tokenizer", "num_samples", "pad_output", "ask_all"), CASES)
def test_the_table_of_keys_is_what_a_policy_writes(
    service, tokenizer, mode, with_tokenizer, num_samples, pad_output, ask_all
):
    policy = VLLMPolicy(
        service,
        input_mode=mode,
        tokenizer=tokenizer if with_tokenizer or mode != "tokens" else None,
        num_samples=num_samples,
        pad_output=pad_output,
        sampling={"logprobs": 2, "prompt_logprobs": 1} if ask_all else None,
    )
    out = policy(prompts(mode))

    when = {"always"} | ({"logprobs", "prompt_logprobs"} if ask_all else set())
    when |= {"tokenizer"} if with_tokenizer or mode != "tokens" else set()
    when |= {"history"} if mode == "history" else set()
    expected = {key_of(row): row for row in WRITTEN if row["Written"] in when}

    batch = (2,) if num_samples is None else (2, num_samples)
    longest_prompt = int(service.generate_calls[-1].prompts.lengths_B.max())
    slots = out.reshape(-1).unbind(0)
    longest_response = max(int(slot["completion", "response_length"]) for slot in slots)
    for slot in slots:
        assert leaves(slot) == expected.keys()
        sizes = sizes_of(slot) if not pad_output else sizes_from(longest_prompt, longest_response)
        for key, row in expected.items():
            value = slot.get(key)
            assert row["Dtype"] == "object" or dtype_name(value) == row["Dtype"], key
            if row["Shape"] != "one for all":
                assert tuple(value.shape) == shape_of(row["Shape"], (), sizes), key
    if pad_output:
        for key, row in expected.items():
            if row["Shape"] != "one for all":
                whole = tuple(out.get(key).shape)
                assert whole == shape_of(row["Shape"], batch, sizes_from(longest_prompt, longest_response)), key


def sizes_from(prompt: int, response: int) -> dict[str, int]:
    return {"P": prompt, "R": response, "F": prompt + response, "turns": 1, "turns+1": 2, "1": 1}


def sizes_of(slot) -> dict[str, int]:
    facts = slot["completion"]
    return sizes_from(int(facts["prompt_length"]), int(facts["response_length"]))


def shape_of(stated: str, batch: tuple[int, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    star, *axes = stated.strip("[]").split(", ")
    assert star == "*", stated
    return (*batch, *(sizes[axis] for axis in axes))


def test_the_table_of_keys_has_no_key_twice():
    assert len({key_of(row) for row in WRITTEN}) == len(WRITTEN)
    assert {row["Written"] for row in WRITTEN} == {"always", "tokenizer", "history", "prompt_logprobs", "logprobs"}


@pytest.mark.parametrize("row", READ, ids=lambda row: row["Key"].strip("`"))
def test_the_keys_that_are_read_are_those_of_the_table(service, row):
    mode, key = row["Read in mode"], key_of(row)
    if "optional" not in row["Forms"]:
        policy = VLLMPolicy(service, input_mode=mode, tokenizer=tiny_tokenizer())
        assert policy.in_keys == [key]
        with pytest.raises(BadInputError, match=re.escape(str(key))):
            policy(TensorDict(batch_size=2))
        return
    padded = TensorDict(tokens=TensorDict(prompt=torch.tensor([[5, 6, 7], [9, 9, 8]]), batch_size=2), batch_size=2)
    mask = torch.tensor([[True, True, True], [False, False, True]])
    policy = VLLMPolicy(service, input_mode=mode, options=PolicyOptions(in_place=False))
    policy(padded)
    policy(padded.clone().set(key, mask))
    without, with_mask = (call.prompts.lengths_B.tolist() for call in service.generate_calls)
    assert (without, with_mask) == ([3, 3], [3, 1])


def test_every_input_mode_is_in_the_table():
    required = [row["Read in mode"] for row in READ if "optional" not in row["Forms"]]
    assert sorted(required) == ["history", "text", "tokens"]


def test_the_table_of_errors_has_every_error_and_its_family():
    stated = {row["Error"].strip("`"): row["Also a"] for row in table("errors.md", "Error")}
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.RLVLLMError) and kind is not errors.RLVLLMError
    }
    assert stated.keys() == classes.keys()
    for name, family in stated.items():
        assert family in {parent.__name__ for parent in classes[name].__mro__[1:]}, name


def defined_in(path: Path) -> set[str]:
    """Top-level names of a module, read and not imported: some of them load vLLM."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def exists(dotted: str) -> bool:
    path, parts = PACKAGE, dotted.split(".")[1:]
    while parts:
        name = parts.pop(0)
        if (path / name).is_dir():
            path = path / name
        elif (path / f"{name}.py").is_file():
            return not parts or (len(parts) == 1 and parts[0] in defined_in(path / f"{name}.py"))
        else:
            return not parts and name in defined_in(path / "__init__.py")
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_names_in_plain_code_exist(page):
    names = re.findall(r"(?<!\})`(rl_vllm(?:\.\w+)+)`", page.read_text())
    assert [name for name in names if not exists(name)] == []


def test_a_name_that_does_not_exist_is_noticed():
    assert exists("rl_vllm.engine.refit.commit_weights")
    assert not exists("rl_vllm.engine.refit.commit_everything")
    assert not exists("rl_vllm.engine.nothing")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_snippet_is_a_cell_or_comes_from_a_program(page):
    """Cells run when the docs are built; ``first_steps.py`` runs below."""
    fences = re.findall(r"^```(\S*)", page.read_text(), re.M)
    assert {fence for fence in fences if fence} <= {"{code-cell}", "{literalinclude}", "{toctree}", "{eval-rst}"}


def test_the_documentation_builds_without_a_warning(tmp_path):
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    run = subprocess.run(
        [*build, "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert {path.stem for path in (tmp_path / "html").glob("*.html")} >= {page.stem for page in PAGES}
    refit = (tmp_path / "html" / "refit.html").read_text()
    assert "failed in commit on replicas [1]" in refit, "the cells' outputs belong to the page"


@pytest.mark.engine
def test_the_first_steps_run_on_a_real_engine(tiny_qwen3_tied):
    run = subprocess.run(
        [sys.executable, str(DOCS / "first_steps.py"), str(tiny_qwen3_tied)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "torch.Size([2, 4])" in run.stdout
    assert "tensor(0)" in run.stdout
    assert "version=1 transport=shared_storage replicas=1" in run.stdout
