"""Anchors that pages, links and tests share."""

import re


def metric(key: str) -> str:
    """group/zero_std_frac -> group-zero_std_frac"""
    return re.sub(r"\W+", "-", key).strip("-")
