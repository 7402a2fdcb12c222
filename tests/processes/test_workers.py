"""Graders in worker processes: whatever one does, the call ends, says what happened, and the next item grades."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT

from common.errors import BadInput, RunFailed
from common.processes.pool import Child, Failure, Pool, Program
from common.rewards.grading import Item, Result
from common.rewards.math_grading import grade_math
from common.rewards.workers import Graders, MathReward, UserReward

MINE = r'''
import os, signal, subprocess, sys, time
import numpy as np
from common.rewards.grading import Result

def each(items, lengths, truncated):
    """What the response says is done."""
    return [globals()[item.response](item) for item in items]

def fine(item): return 1
def wrong(item): return -0.5
def of_numpy(item): return np.float32(0.5)
def result(item): return Result(2, 1, "x", {"why": "\ud800"})
def ungraded(item): return Result(None, None)
def nan(item): return float("nan")
def infinite(item): return Result(float("-inf"), 0)
def nothing(item): return None
def text(item): return "1.0"
def half(item): return Result("good", 1)
def informed(item): return Result(1, 1, None, ["why"])
def uninformed(item): return Result(1, 1, None, None)
def noisy(item): print("noise"); os.system("echo noise"); return float(sys.stdin.read() == "")
def loop(item):
    while True: pass
def eat(item):
    hoard = []
    while True: hoard.append(bytes(10**7))
def boom(item): raise ValueError("boom")
def leave(item): sys.exit(3)
def kill(item): os.kill(os.getpid(), signal.SIGKILL)
def child(item):
    process = subprocess.Popen(["sleep", "1000"])
    open(item.answer, "w").write(f"{os.getpid()} {process.pid}")
    loop(item)
def escape(item):
    if os.fork() == 0:
        os.setsid()
        time.sleep(20)
        os._exit(0)
    loop(item)
def process(item): return os.getpid()
def light(item): return float(not {"torch", "sympy"} & set(sys.modules))
def environment(item): return float(os.environ["OMP_NUM_THREADS"] + os.environ["CUDA_VISIBLE_DEVICES"] == "1")

def together(items, lengths, truncated): return [float(len(items))] * len(items)
def short(items, lengths, truncated): return [1.0] * (len(items) - 1)
def none(items, lengths, truncated): return None
def echo(items, lengths, truncated):
    return [Result(0, 0, None, {"given": [vars(item), n, cut]}) for item, n, cut in zip(items, lengths, truncated)]
'''


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(MINE)
    return str(path)


def graders(path: str, function: str, item_seconds: float, workers: int = 1) -> Graders:
    arguments = [path, function, 0.5]  # 0.5 GiB
    return Graders(f"{path}:{function}", "common.rewards.workers:load_function", arguments, item_seconds, workers)


@pytest.fixture(scope="module")
def pool(mine):
    pool = graders(mine, "each", item_seconds=3.0, workers=2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def patient_pool(mine):
    """For items whose workers die: an interpreter that ends may take seconds on a busy machine."""
    pool = graders(mine, "each", item_seconds=60.0, workers=2)
    yield pool
    pool.close()


def graded(pool: Graders, *responses: str, answer: str = "5") -> list:
    """The outcome of each response: a Result or a Failure."""

    def grade(response: str):
        outcome = pool.grade([Item("p", response, answer)], [3], [False])
        return outcome if isinstance(outcome, Failure) else outcome[0]

    return list(pool.map(grade, responses))


def test_a_loader_that_hangs_has_a_limit_of_its_own(tmp_path):
    """A reward model takes longer to load than an item to grade, and a user's file should not."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    arguments = [str(tmp_path / "slow.py"), "f", 0.5]
    pool = Graders("slow", "common.rewards.workers:load_function", arguments, 1.0, 1, start_seconds=2.0)
    with pytest.raises(RunFailed, match="no answer within 2 s"):
        pool.start()
    pool.close()


def test_an_answer_ends_its_timer(pool):
    """Each is a thread, for as long as the limit. A step has thousands of answers."""
    before = set(threading.enumerate())
    assert [result.score for result in graded(pool, "fine", "fine")] == [1, 1]
    left = [thread for thread in set(threading.enumerate()) - before if isinstance(thread, threading.Timer)]
    for timer in left:
        timer.join(timeout=1)  # one that was cancelled ends at once, and the limit of an item is 3 s
    assert not any(timer.is_alive() for timer in left)


def test_results(pool):
    results = graded(pool, "fine", "wrong", "of_numpy", "result", "ungraded", "infinite", "nan")
    expected = [(1, 1), (-0.5, 0), (0.5, 1), (2, 1), (None, None), (-math.inf, 0)]
    assert [(result.score, result.acc) for result in results[:-1]] == expected
    assert isinstance(results[3].score, float) and results[3].info == {"why": "\ud800"}
    assert math.isnan(results[-1].score)
    assert graded(pool) == []


def test_the_worker_is_quiet_and_light(pool):
    assert [result.score for result in graded(pool, "noisy", "light", "environment")] == [1, 1, 1]


@pytest.mark.parametrize(
    "response, kind, message",
    [
        ("loop", "timeout", "no answer within 3 s"),
        ("escape", "timeout", "no answer within 3 s"),
        ("eat", "died", "memory"),
        ("boom", "raised", "ValueError: boom"),
        ("leave", "died", "exit status 3"),
        ("kill", "died", "exit status -9"),
        ("nothing", "wrong", "expected a number or a Result, got 'None', NoneType"),
        ("text", "wrong", "expected a number or a Result, got '1.0', str"),
        ("half", "wrong", "expected a number or None, got 'good', str"),
        ("informed", "wrong", "expected a dictionary"),
    ],
)
def test_a_bad_item_fails_alone(pool, patient_pool, response, kind, message):
    start = time.monotonic()
    pool = patient_pool if kind == "died" else pool
    bad, *good = graded(pool, response, "uninformed", "fine", "fine")
    assert time.monotonic() - start < 60  # far from a timeout of minutes, also on a busy machine
    assert isinstance(bad, Failure) and bad.kind == kind and message in bad.message
    assert [result.score for result in good] == [1, 1, 1]
    assert good[0].info == {}
    assert kind != "raised" or ("def boom" in bad.message and "processes/child" not in bad.message)


def test_a_late_process_is_late_even_if_its_end_is_noticed_at_once(mine, monkeypatch):
    kill = Child.kill

    def kill_and_let_the_reader_notice(child):
        kill(child)
        if threading.current_thread() is not child.reader:
            child.reader.join()

    monkeypatch.setattr(Child, "kill", kill_and_let_the_reader_notice)
    pool = graders(mine, "each", item_seconds=1.0)
    (late,) = graded(pool, "loop")
    pool.close()
    assert late == Failure("timeout", "no answer within 1 s")


def gone(pid: int) -> bool:
    """Whether a process has ended, or will once its parent looks."""
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


def eventually(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def test_children_of_a_grader_die_with_it(pool, tmp_path):
    assert graded(pool, "child", answer=str(tmp_path / "pids"))[0].kind == "timeout"
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and eventually(lambda: all(map(gone, pids)))


def test_workers_end_with_a_killed_parent_even_in_a_loop(mine, tmp_path):
    script = (
        "from common.processes.pool import Program, Worker\n"
        f"program = Program('mine', 'common.rewards.workers:load_function', [{mine!r}, 'each'], 'reward-failed')\n"
        f"item = dict(prompt='', response='child', answer={str(tmp_path / 'pids')!r})\n"
        "Worker(program).ask([[item], [1], [False]], 600.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        assert eventually(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text(), 60)
    finally:
        parent.kill()
        parent.wait()
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert eventually(lambda: all(map(gone, pids)))


def test_a_worker_is_kept_and_replaced_after_many_tasks(mine):
    program = Program("mine", "common.rewards.workers:load_function", [mine, "each"], "reward-failed", max_requests=3)
    pool = Pool(program, size=1)
    request = [[vars(Item("p", "process", "5"))], [1], [False]]
    pids = [int(pool.ask(request, 10.0)[0][0]) for _ in range(8)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 2]
    os.kill(pids[-1], signal.SIGKILL)  # while it is idle: no task is lost
    assert eventually(lambda: gone(pids[-1]))
    time.sleep(0.2)  # the pool's own thread learns of it a moment later, and until then the task fails
    survivor = int(pool.ask(request, 10.0)[0][0])
    pool.close()
    assert survivor not in pids and gone(survivor)


def test_a_worker_that_cannot_start_is_not_tried_for_each_task(tmp_path):
    (tmp_path / "bad.py").write_text(f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\nimport absent_module\n")
    pool = graders(str(tmp_path / "bad.py"), "f", item_seconds=1.0)
    with pytest.raises(RunFailed, match="(.*\n)*.*No module named"):
        graded(pool, *["fine"] * 100)
    assert len((tmp_path / "starts").read_text()) == 1


def test_a_process_that_writes_something_else_is_killed(tmp_path):
    """Its open request is lost, and the next one has a new process."""
    (tmp_path / "liar.py").write_text(
        "import os\n"
        "def each(items, lengths, truncated):\n"
        "    if items[0].response == 'lie':\n"
        "        for fd in range(3, 20):\n"
        "            try:\n"
        "                os.write(fd, b'[7, 1, null]\\n')\n"
        "            except OSError:\n"
        "                pass\n"
        "    return [1.0]\n"
    )
    pool = graders(str(tmp_path / "liar.py"), "each", item_seconds=10.0)
    lost, result = graded(pool, "lie", "fine")
    pool.close()
    assert lost.kind == "died" and result.score == 1


def rewarded(path: str, function: str, items: list[Item], **limits) -> list[Result]:
    reward = UserReward(path, function, workers=2, **limits)
    try:
        return reward(items, [len(item.response_ids) for item in items], [False] * len(items))
    finally:
        reward.pool.close()


def test_a_user_reward_sees_all_responses_to_a_prompt_at_once(mine):
    items = [Item(prompt, "fine", "5") for prompt in "aaabbc"]
    assert [result.score for result in rewarded(mine, "together", items)] == [3, 3, 3, 2, 2, 1]


def test_an_error_shows_all_responses_of_its_call_and_whether_a_model_wrote_them(mine):
    """Any of them may be the culprit."""
    items = [Item("a", "fine", "5"), Item("a", "boom", "5")]
    with pytest.raises(RunFailed, match=r"prompt 'a', one of the 2 responses 'fine', 'boom'"):
        rewarded(mine, "each", items)
    reward = UserReward(str(mine), "each")
    with pytest.raises(BadInput, match="^--reward .*invented responses.*'fine', 'boom'"):
        reward.try_out(items, [1, 1], [False, False])
    reward.pool.close()


def test_items_arrive_whole(mine):
    items = [Item("p\n\u2028", "r\ud800\0", "a", {"n": 1, "path": Path("x")}, [7, 8])]
    expected = [{**vars(items[0]), "meta": {"n": 1, "path": "x"}}, 2, False]
    assert rewarded(mine, "echo", items) == [Result(0.0, 0.0, None, {"given": expected})]


def test_late_and_dead_workers_leave_their_prompt_ungraded(mine, capsys):
    items = [Item("a", "fine", "5"), Item("a", "loop", "5"), Item("b", "fine", "5"), Item("c", "kill", "5")]
    results = rewarded(mine, "each", items, item_seconds=3.0)
    assert [result.score for result in results] == [None, None, 1.0, None]
    late, died = {"timeout": "no answer within 6 s"}, {"died": "exit status -9"}
    assert [result.info for result in results] == [late, late, {}, died]
    warning = f"warning[reward-slow]: reward \"{mine}:each\" took too long on 2 of 4 responses, such as prompt 'a'"
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    "function, response, error, words",
    [
        ("each", "boom", RunFailed, ["mine.py:each", "'b'", "'fine'", "def boom", "ValueError: boom"]),
        ("each", "nothing", BadInput, ["mine.py:each", "'b'", "result 1", "got 'None', NoneType"]),
        ("each", "text", BadInput, ["mine.py:each", "'b'", "result 1", "got '1.0', str"]),
        ("short", "fine", BadInput, ["mine.py:short", "returned 1 results for 2 items"]),
        ("none", "fine", BadInput, ["mine.py:none", "expected a list of 2 results, one for each response, got None"]),
    ],
)
def test_a_wrong_user_reward_is_named(mine, function, response, error, words):
    items = [Item("a", "fine", "5"), Item("a", "fine", "5"), Item("b", "fine", "5"), Item("b", response, "5")]
    with pytest.raises(error) as raised:
        rewarded(mine, function, items)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    "source, words",
    [
        ("def other(): pass", ['bad.py has no function "f"']),
        ("def ff(): pass", ['bad.py has no function "f" (did you mean ff?)']),
        ("import absent_module", ["bad.py", "cannot be loaded", "No module named 'absent_module'"]),
        ("def f(:", ["bad.py", "SyntaxError"]),
        ("import sys; sys.exit(4)", ["bad.py", "cannot be loaded: exit status 4"]),
    ],
)
def test_a_user_file_is_tried_before_the_run(tmp_path, source, words):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(BadInput) as raised:
        UserReward(str(tmp_path / "bad.py"), "f")
    assert str(raised.value).startswith("--reward: ") and all(word in str(raised.value) for word in words)
    with pytest.raises(BadInput, match=r"--reward: absent.py"):
        UserReward("absent.py", "f")


MATH = [
    (r"\boxed{1/2}", "0.5"),
    ("none", "5"),
    (r"\boxed{7}", "7"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    (r"\boxed{3}", "4"),
]


@pytest.fixture(scope="module")
def math_reward():
    reward = MathReward(workers=1)
    yield reward
    reward.pool.close()


def grade(reward, pairs=MATH) -> list[Result]:
    items = [Item("p", response, answer) for response, answer in pairs]
    return reward(items, [9] * len(items), [False] * len(items))


def test_threads_and_executors_give_what_the_main_thread_gives(math_reward):
    expected = [grade_math(response, answer) for response, answer in MATH]
    assert [result.acc for result in expected] == [1, 0, 1, 1, 0]
    assert grade(math_reward) == expected
    threaded = []
    thread = threading.Thread(target=lambda: threaded.extend(grade(math_reward)))
    thread.start()
    thread.join()

    async def in_executor():
        return await asyncio.get_running_loop().run_in_executor(None, grade, math_reward)

    assert threaded == expected and asyncio.run(in_executor()) == expected


@pytest.mark.slow
def test_poisoned_expressions_cost_their_time_and_the_next_item_still_grades(math_reward, capsys, monkeypatch):
    monkeypatch.setattr(math_reward.pool, "item_seconds", 3.0)
    bad = ["99^{99^{99}}", r"9^{9^{9^{9^{9}}}}", r"\binom{10^{9}}{5\cdot 10^{8}}", r"(10^{9})!"]
    start = time.monotonic()
    results = grade(math_reward, [*((rf"\boxed{{{text}}}", "7") for text in bad), (r"\boxed{1/2}", "0.5")])
    assert time.monotonic() - start < 5 * len(bad) + 180
    assert [result.acc for result in results] == [0, 0, 0, 0, 1]
    assert "timeout" in results[0].info and "took too long" in capsys.readouterr().err


def test_math_rows_whose_worker_fails_are_wrong(mine):
    reward = MathReward(workers=1)
    reward.pool = graders(mine, "each", item_seconds=3.0)
    try:
        results = [result for text in ("loop", "kill", "boom") for result in failing(reward, text)]
        reward.pool.close()
        reward.pool = graders(mine, "absent", item_seconds=1.0)
        with pytest.raises(RunFailed, match='mine.py .*"absent"'):
            failing(reward, "fine")
    finally:
        reward.pool.close()
    assert [(result.score, result.acc) for result in results] == [(0, 0)] * 3
    assert [list(result.info) for result in results] == [["timeout"], ["died"], ["error"]]
    assert results[-1].info["error"] == "ValueError: boom"


def failing(reward: MathReward, text: str) -> list[Result]:
    """The reward of a response that needs its worker, which is told to do `text`."""
    reward.mode = "flexible"  # passes any text on
    return grade(reward, [(text, "7")])


@pytest.mark.slow
def test_easy_math_is_fast():
    pairs = [(rf"\boxed{{{n}/2}}", rf"\frac{{{n}}}{{2}}") for n in range(1, 1025)]
    reward = MathReward(workers=2)
    grade(reward, pairs[:8])  # starts the workers
    start = time.monotonic()
    assert all(result.acc == 1 for result in grade(reward, pairs))
    reward.pool.close()
    assert time.monotonic() - start < 120
