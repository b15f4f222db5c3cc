"""The package keeps the house rules, and each rule fires on code that breaks it."""

import subprocess
import sys
from pathlib import Path

import pytest

import rl_vllm
from tests.house import rules

PACKAGE = Path(rl_vllm.__file__).parent


def rules_broken_by(source: str, path: str = "policy/example.py") -> set[str]:
    return {violation.rule for violation in rules.check_file(rules.SourceFile.parse(source, path=path))}


def test_the_package_keeps_every_rule():
    violations = rules.check_package(PACKAGE)
    assert not violations, "\n".join(map(str, violations))


def test_the_check_reads_the_files_of_the_package(tmp_path):
    folder = tmp_path / "rl_vllm"
    (folder / "policy").mkdir(parents=True)
    (folder / "errors.py").write_text("x = 1\n")
    (folder / "policy" / "bad.py").write_text("x = 1\nimport vllm\n")
    assert [str(violation) for violation in rules.check_package(folder)] == [
        "policy/bad.py:2: fenced_packages: only engine, server may import vllm"
    ]


BODY_60 = "".join(f"    x{i} = {i}\n" for i in range(59))
PARAMETERS_8 = ", ".join(f"p{i}" for i in range(8))

BROKEN = {
    "a file of 401 lines": ("short_files", "x = 1\n" * 401),
    "a function of 61 lines": ("short_functions", f"def f():\n{BODY_60}    return 0\n"),
    "nine parameters": ("few_parameters", f"def f({PARAMETERS_8}, *, p8): ..."),
    "a layer above": ("import_direction", "from rl_vllm.service import AsyncVLLM"),
    "a layer above, from the package": ("import_direction", "from rl_vllm import service"),
    "a layer above, by a relative import": ("import_direction", "from ..service import AsyncVLLM"),
    "a layer above, inside a function": ("import_direction", "def f():\n    import rl_vllm.engine.actor\n"),
    "vllm outside the engine": ("fenced_packages", "from vllm import LLM"),
    "ray in the policy": ("fenced_packages", "import ray.util"),
    "a silent except": ("answered_exceptions", "try:\n    f()\nexcept KeyError:\n    pass\n"),
    "a bare except": ("answered_exceptions", "try:\n    f()\nexcept:\n    x = 0\n"),
    "a broad except that logs": ("answered_exceptions", "try:\n    f()\nexcept Exception:\n    log.exception('no')\n"),
    "a broad except in a tuple": ("answered_exceptions", "try:\n    f()\nexcept (OSError, Exception):\n    x = 0\n"),
    "hasattr": ("stated_types", "x = hasattr(y, 'abort')"),
    "getattr with a default": ("stated_types", "x = getattr(y, 'abort', None)"),
    "ray.get without a deadline": ("bounded_waits", "x = ray.get(refs)"),
    "ray.wait without a deadline": ("bounded_waits", "x, y = ray.wait(refs, num_returns=2)"),
    "ray.get on an event loop": ("bounded_waits", "async def f():\n    ray.get(refs, timeout=1)\n"),
}


@pytest.mark.parametrize(("rule", "source"), BROKEN.values(), ids=BROKEN.keys())
def test_a_rule_fires_on(rule, source):
    assert rules_broken_by(source) == {rule}


KEPT = {
    "a file of 400 lines": "x = 1\n" * 400,
    "a function of 60 lines and a docstring": f'def f():\n    """One.\n\n    Two.\n    """\n{BODY_60}',
    "eight parameters and self": f"class C:\n    def f(self, {PARAMETERS_8}): ...\n",
    "the seams and the own layer": "from rl_vllm.types import x\nfrom rl_vllm.policy.y import z\nfrom .a import b\n",
    "a broad except that raises": "try:\n    f()\nexcept Exception as error:\n    raise E from error\n",
    "a broad except that tells a future": "try:\n    f()\nexcept Exception as e:\n    future.set_exception(e)\n",
    "a named error with an answer": "try:\n    f()\nexcept KeyError:\n    x = 0\n",
    "getattr without a default": "x = getattr(y, name)",
    "ray.get with a deadline": "x = ray.get(refs, timeout=3)",
}


@pytest.mark.parametrize("source", KEPT.values(), ids=KEPT.keys())
def test_no_rule_fires_on(source):
    broken = rules_broken_by(source)
    assert broken == set()


def test_a_module_outside_the_import_table_is_reported():
    assert rules_broken_by("x = 1\n", path="helpers.py") == {"known_layers"}


def test_imports_only_go_down_the_table():
    """No two layers may import each other, directly or through others."""
    above = dict(rules.ALLOWED_IMPORTS)
    while above:
        bottom = [layer for layer, allowed in above.items() if not allowed & above.keys()]
        assert bottom, f"these layers import each other in a circle: {sorted(above)}"
        for layer in bottom:
            del above[layer]


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter loads for a statement, as its import timer reports them."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement], capture_output=True, text=True, check=True
    )
    names = (line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:"))
    return {name.split(".")[0] for name in names}


def test_importing_the_package_loads_nothing_heavy():
    loaded = modules_loaded_by("import rl_vllm")
    assert "rl_vllm" in loaded
    assert loaded.isdisjoint({"vllm", "ray", "torch", "tensordict", "torchrl", "transformers", "numpy"})


def test_a_config_is_made_without_vllm_or_ray():
    loaded = modules_loaded_by("from rl_vllm import SamplingConfig; SamplingConfig(max_tokens=4)")
    assert "numpy" in loaded
    assert loaded.isdisjoint({"vllm", "ray", "torch"})
