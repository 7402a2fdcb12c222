"""The documentation site: stages the pages of this repository for Zensical (scripts/build_site.py runs it)."""
