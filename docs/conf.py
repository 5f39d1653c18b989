"""How Sphinx makes the site: make docs.

The source folder is the repository, so that README.md, the notebooks and the links between all of
them are what they are on a git host; this folder only holds the configuration.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

from functional_optim import __version__

# no notebooks, or no page that was not thought of, is no fault; Sphinx has no name for that warning
logging.getLogger("sphinx.sphinx.directives.other").addFilter(
    lambda record: "glob pattern" not in str(record.msg)
)

# of torch 2.14 itself, in forward-mode derivatives
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")

project = "functional_optim"
author = "the authors of functional_optim"
version = release = __version__
html_title = f"{project} {version}"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "myst_nb",
    "sphinx_copybutton",
    "algorithm_index",
    "docstrings",
    "guides",
    "loss_curves",
    "measured_rates",
    "public_names",
    "speed",
]

root_doc = "docs/index"
include_patterns = [
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/*.md",
    "docs/**.md",
    "docs/**.rst",
    "notebooks/README.md",
    "notebooks/*.ipynb",
]
exclude_patterns = [".*", "build", "out", "dist", "tests", "examples", "**/.ipynb_checkpoints"]
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*")]  # types: of other packages, or not public

# Markdown and notebooks
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # their outputs are stored; tests run them

# docstrings
default_role = "code"
add_module_names = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_type_aliases = {
    "numeric.Hyper": "Hyper",
    "numeric.Number": "Number",
    "numeric.Schedule": "Schedule",
    "Hyper": "Hyper",
    "Number": "Number",
    "Schedule": "Schedule",
    "base.GradientTransformation": "GradientTransformation",
    "Betas": "Betas",
    "Labels": "Labels",
    "Mask": "Mask",
    "Tree": "Tree",
}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

# HTML
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_additional_pages = {"index": "to_start.html"}
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
