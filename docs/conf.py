"""Sphinx configuration; `make docs` builds without the network and turns warnings into errors."""

import os
import shutil
from pathlib import Path

import rl_vllm

HERE = Path(__file__).parent
# Sphinx reads only files below this folder. A copy, not a link: the formatter would write the notebook twice at once.
shutil.copyfile(HERE.parent / "tutorials" / "01_policy.ipynb", HERE / "01_policy.ipynb")

# The pages' cells run in kernels that inherit this: a model id must not be looked for on the hub.
os.environ["HF_HUB_OFFLINE"] = "1"

project = "rl_vllm"
author = "the rl_vllm authors"
copyright = author
version = release = rl_vllm.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Cells run at every build, and one that fails fails the build. The tutorial starts an engine and is stored with its
# outputs; its own test runs it.
nb_execution_mode = "force"
nb_execution_excludepatterns = ["01_policy.ipynb"]
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_show_tb = True
nb_output_stderr = "remove"

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# A reference that leads nowhere is an error when it is one of ours; other projects' pages are not looked up.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!rl_vllm\.).*")]
nitpick_ignore = [
    ("py:class", name)
    for name in (
        "rl_vllm.service.outputs.LogprobRows",
        # What the service builds its own parts from.
        "rl_vllm.service.core.Core",
        "rl_vllm.service.jobs.GenerateJob",
        "rl_vllm.service.pieces.PieceReader",
        "rl_vllm.service.replicas.Replica",
        "rl_vllm.service.requests.LiveRequest",
    )
]

html_theme = "furo"
html_title = f"rl_vllm {release}"
html_copy_source = False
