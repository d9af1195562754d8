"""Sphinx configuration of the documentation site. ``make docs`` builds it; warnings are errors."""

project = "sglang-rollout"
author = "the sglang-rollout authors"
copyright = "the sglang-rollout authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated"]

# Pages are Markdown. Headings get the anchors that a forge gives them, so links work on both.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]  # :::{warning} … :::
myst_links_external_new_tab = False
highlight_language = "none"

# The reference of the trainer client is made from its docstrings.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
default_role = "code"
smartquotes_action = "D"  # dashes between a parameter and its description, and no curly quotation marks
napoleon_use_ivar = True

html_theme = "furo"
html_title = "sglang-rollout"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
