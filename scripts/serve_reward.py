"""Serves any grader for `--reward http://HOST:PORT`. The docstring of common/rewards/service.py has the contract.

    python scripts/serve_reward.py --reward gsm8k                             # on http://127.0.0.1:8001
    python scripts/serve_reward.py --reward math --threads 8                  # eight batches at once
    python scripts/serve_reward.py --reward my_reward.py:grade --port 8002    # a function of yours
    REWARD_TOKEN=secret python scripts/serve_reward.py --host 0.0.0.0         # for other machines
    python algos/grpo.py --reward http://127.0.0.1:8001                       # with that REWARD_TOKEN, if there is one

A grader sees what it would see in the trainer, except for token ids, in requests of at most 64 responses. If it
raises, the service prints the traceback and answers with status 500, and the trainer tries again. A result without a
finite score gives an error for that row alone.
"""

import asyncio
import dataclasses
import functools
import hmac
import json
import math
import os
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import tyro
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, Field

from common import errors, rewards
from common.data import json_lines
from common.data.rows import split_weight
from common.preflight.docstrings import help_text
from common.rewards.grading import Item, Result, Reward
from common.rewards.schema import parse_as
from common.rewards.service import MAX_ITEMS, MAX_REQUEST_BYTES, VERSION, group_of, plain

REMEMBERED_REQUESTS = 256  # the service keeps the answers to this many requests


@dataclasses.dataclass
class Args:
    reward: str = "gsm8k"  # One reward, as in --reward of algos/: gsm8k, math, file.py:function, model:FOLDER, ...
    host: str = "127.0.0.1"  # Address to listen on. Only this machine reaches the default; everybody reaches 0.0.0.0.
    port: int = 8001  # Port to listen on.
    threads: int = 1  # Batches graded at the same time. More than 1 needs a grader that several threads may call.


class Row(BaseModel):
    id: str
    prompt: str
    response: str
    answer: str | None = None
    meta: dict = {}  # with "length" and "truncated" if the client knows them


class Score(BaseModel):
    version: Literal[1]
    request_id: str = Field(min_length=1, max_length=200)
    items: list[Row] = Field(max_length=MAX_ITEMS)


def grade(reward: Reward, asked: Score) -> bytes:
    """The reply to a request. Raises what the grader raises."""
    metas = [dict(row.meta) for row in asked.items]
    lengths = [meta.pop("length", 0) for meta in metas]
    truncated = [meta.pop("truncated", False) for meta in metas]
    items = [
        Item(row.prompt, row.response, row.answer, meta, group=group_of(row.id))
        for row, meta in zip(asked.items, metas)
    ]
    results = reward(items, lengths, truncated) if items else []
    if len(results) != len(items):
        raise ValueError(f"the grader returned {len(results)} results for {len(items)} items")
    entries = [{"id": row.id, **describe(result)} for row, result in zip(asked.items, results)]
    reply = {"version": VERSION, "request_id": asked.request_id, "results": entries}
    return json.dumps(reply, allow_nan=False).encode()  # ASCII: UTF-8 cannot hold a lone surrogate of a response


def describe(result: Result) -> dict:
    info = {**plain(result.info), "extracted": result.extracted}
    if result.score is None or not math.isfinite(result.score):
        reason = str(info.get("error") or f"the grader's score is {result.score}: {result.info}")
        return {"score": None, "acc": None, "error": reason, "info": info}
    acc = None if result.acc is None else float(result.acc)
    return {"score": float(result.score), "acc": acc, "error": None, "info": info}


async def read(request: Request) -> Score:
    """The body of a request. Raises HTTPException: 413 if it is too large, 422 if it breaks the contract."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_REQUEST_BYTES:
            raise HTTPException(413, f"a request holds {MAX_REQUEST_BYTES} bytes")
    try:
        return parse_as(Score, json_lines.parse(body))  # not pydantic's own JSON: it refuses lone surrogates
    except ValueError as error:
        raise HTTPException(422, str(error)) from None


def serve(reward: Reward, name: str, token: str, threads: int) -> FastAPI:
    """The application. An empty token asks for none."""
    app = FastAPI(title="reward service", version=str(VERSION))
    pool = ThreadPoolExecutor(threads)  # outside of the event loop, so that /health answers while a batch is graded
    jobs: dict[str, asyncio.Future] = {}  # by request id: a request that is sent again gets the first answer

    def authorize(request: Request) -> None:
        given = request.headers.get("Authorization", "").encode()
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "expected the header Authorization: Bearer REWARD_TOKEN")

    @app.get("/health")
    async def health(request: Request) -> dict:
        authorize(request)
        return {"status": "ok", "name": name, "version": str(VERSION)}

    @app.post("/score")
    async def score(request: Request) -> Response:
        authorize(request)
        asked = await read(request)
        job = jobs.get(asked.request_id)
        if job is None:
            job = asyncio.get_running_loop().run_in_executor(pool, functools.partial(grade, reward, asked))
            jobs[asked.request_id] = job
            if len(jobs) > REMEMBERED_REQUESTS:
                del jobs[next(iter(jobs))]  # the oldest
        try:
            return Response(await asyncio.shield(job), media_type="application/json")
        finally:
            if job.cancelled() or (job.done() and job.exception()):
                jobs.pop(asked.request_id, None)  # the next try grades it again

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:  # uvicorn prints the traceback
        reason = "".join(traceback.format_exception_only(error)).strip().rpartition("\n")[2]
        return Response(json.dumps({"detail": reason[:300]}), 500, media_type="application/json")

    return app


def main(args: Args) -> None:
    if args.threads < 1 or not 0 < args.port < 65536:
        raise errors.BadInput(f"--threads {args.threads} must be >= 1 and --port {args.port} in 1 ... 65535")
    name, weight = split_weight(args.reward)
    if name != args.reward:
        cure = f"give it to the trainer: --reward http://...={weight:g}"
        raise errors.BadInput(f"--reward {args.reward}: a service has one reward, and no weight; {cure}")
    here = {"repetition": "reads token ids", "environment": "plays with the policy", "model-sharded": "needs all ranks"}
    if reason := here.get(args.reward.partition(":")[0]):
        raise errors.BadInput(f"--reward {args.reward}: it {reason}, so that it can only be used in the trainer")
    reward, token = rewards.load_one(args.reward), os.environ.get("REWARD_TOKEN", "").strip()
    if not token and args.host not in ("127.0.0.1", "localhost", "::1"):
        errors.say(f"warning: --host {args.host} without REWARD_TOKEN: whoever reaches this port can use the grader")
    app = serve(reward, args.reward, token, args.threads)
    uvicorn.run(app, host=args.host, port=args.port, access_log=False)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
