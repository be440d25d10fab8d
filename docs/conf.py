"""Configuration of the documentation site: `make docs` builds it with Sphinx into build/docs."""

from lockstep.version import __version__

project = "Lockstep"
author = "the Lockstep authors"
release = __version__
extensions = ["myst_parser"]
html_theme = "furo"
html_title = f"Lockstep {release}"
html_show_copyright = False
exclude_patterns = ["make_api.py", "make_pictures.py", "pictures"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # docs/api.md begins its classes one level down
