"""The tutorials run on a real engine, and their stored outputs are clean."""

import json
from pathlib import Path

import nbformat
import pytest

from tutorials.execute import executed

FOLDER = Path(__file__).parents[2] / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# Nats, both sides in float32: the kernels alone make some 1e-4 on this model, wrong weights whole nats.
LARGEST_DIFFERENCE = 1e-3

FACTS = """
import json

print(json.dumps({
    "before a refit": difference,
    "by label": differences["by label"],
    "by newest": differences["by newest"],
    "versions in one batch": version[story["masks", "all_assistant_mask"]].unique().tolist(),
    "versions of unsampled positions": version[~story["masks", "all_assistant_mask"]].unique().tolist(),
    "answers": [answer_before, after["text"].response],
    "version of the last refit": receipt.version,
}))
"""


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_outputs_are_complete_and_of_no_machine(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    text = path.read_text()
    assert [name for name in ("/home/", "/root/", "/tmp/", "site-packages", "Warning") if name in text] == []


def test_the_policy_tutorial_has_one_picture():
    cells = code_cells(nbformat.read(FOLDER / "01_policy.ipynb", as_version=4))
    pictures = [output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 1


@pytest.mark.engine
def test_the_policy_tutorial_shows_what_it_says():
    notebook = executed(FOLDER / "01_policy.ipynb", last_cell=FACTS)
    facts = json.loads(notebook.cells[-1].outputs[0].text)
    assert facts["before a refit"] < LARGEST_DIFFERENCE
    assert facts["versions in one batch"] == [1, 2]
    assert facts["versions of unsampled positions"] == [-1]
    assert facts["by label"] < LARGEST_DIFFERENCE
    assert facts["by newest"] > 100 * LARGEST_DIFFERENCE, "without labels the logprobs must be visibly wrong"
    assert facts["version of the last refit"] == 2
    before, after = facts["answers"]
    assert "Ahoy" not in before
    assert after == "Ahoy, sailor!<|im_end|>"
