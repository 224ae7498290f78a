"""Settings of the documentation site, which `make docs` builds; CONTRIBUTING.md says how."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_sphinx"), str(HERE.parent)]

import fxtrain  # noqa: E402

project = "fxtrain"
author = "the fxtrain authors"
version = release = fxtrain.__version__
html_title = f"fxtrain {release}"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "site_extension",
]
exclude_patterns = ["_*"]
nitpicky = False  # single backticks in docstrings are links where they name something public

myst_heading_anchors = 6  # the same anchors as on GitHub
myst_enable_extensions = ["smartquotes"]
suppress_warnings = [
    "myst.header",  # the changelog starts at the second level
    "ref.python",  # torch's dtype in an annotation, which attributes of two classes are called too
]

default_role = "py:obj"
add_module_names = False
maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# The attributes of a record are the arguments that construct it.
napoleon_custom_sections = ["Effects", "Source", ("Attributes", "params_style")]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
