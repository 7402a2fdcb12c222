"""What a reward service answers, checked against the contract of common/reward_service.py."""

import sys
from collections import Counter
from typing import NoReturn

from common.errors import visible
from common.grading import Result
from common.json_lines import parse as parse_json

VERSION = 1


def parse(body: bytes, request_id: str, batch: dict[int, bytes]) -> dict[int, Result]:
    """Results by row, whatever their order. Raises ValueError, saying what breaks the contract."""
    reply = parse_json(body, constant=refuse)
    if not isinstance(reply, dict) or not isinstance(reply.get("results"), list):
        raise ValueError('expected an object with a list "results"')
    for key, expected in (("version", VERSION), ("request_id", request_id)):
        if reply.get(key) != expected:
            raise ValueError(f'"{key}" is {reply.get(key)!r:.50}, expected {expected!r}')
    entries = [entry if isinstance(entry, dict) else {} for entry in reply["results"]]
    ids = Counter(repr(entry.get("id")) for entry in entries)  # repr: 17 is not "17", and a list can be counted
    asked = Counter(repr(str(row)) for row in batch)
    if ids != asked:
        some = lambda ids: ", ".join(list(ids)[:3])[:100] or "none"
        raise ValueError(f"ids missing: {some(asked - ids)}; unknown or repeated: {some(ids - asked)}")
    return {int(entry["id"]): parse_result(entry) for entry in entries}


def refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def parse_result(entry: dict) -> Result:
    """Raises ValueError."""
    score, acc, error = entry.get("score"), entry.get("acc"), entry.get("error")
    if error is not None:
        return Result(None, None, None, {"error": visible(" ".join(str(error)[:2000].split()))[:500]})
    for key, value in (("score", score), ("acc", 0.0 if acc is None else acc)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or abs(value) > sys.float_info.max:  # 1e999 is inf, and an int may be larger than any float
            raise ValueError(f'"{key}" of id {entry["id"]} is {value!r:.50}, expected a finite number')
    info = {} if entry.get("info") is None else entry["info"]
    if not isinstance(info, dict):
        raise ValueError(f'"info" of id {entry["id"]} is {info!r:.50}, expected an object')
    extracted = info.pop("extracted", None)
    return Result(float(score), None if acc is None else float(acc), extracted and str(extracted), info)
