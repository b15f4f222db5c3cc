"""Run the notebooks of this folder and store their outputs: ``python tutorials/execute.py``.

What goes to stderr (warnings and logs, with paths of the machine) is not stored.
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
CELL_TIMEOUT_S = 300


def executed(path: Path, *, last_cell: str | None = None) -> nbformat.NotebookNode:
    """The notebook with fresh outputs; the file is not changed.

    Args:
        path: The notebook.
        last_cell: Code to run after its own cells.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised; its traceback is in the message.
    """
    notebook = nbformat.read(path, as_version=4)
    if last_cell is not None:
        notebook.cells.append(nbformat.v4.new_code_cell(last_cell))
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    # The interpreter's exact version differs between machines.
    notebook.metadata.language_info = {"name": "python"}
    return notebook


if __name__ == "__main__":
    for notebook_path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(notebook_path), notebook_path)
