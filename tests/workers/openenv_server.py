"""A server of the real openenv-core, for tests/rollout/test_openenv.py: python openenv_server.py KIND PORT SESSIONS.

KIND is a class of this file.
"""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from common.rollout.environments import Problem, built_in


class Text(Action):
    message: str


class Pair(Action):
    low: int
    high: int


class Said(Observation):
    text: str = ""


class Counted(Observation):
    text: str = ""
    turns: int = 0


class Guess(Environment):
    """The game of built_in.Guess. The reward comes at the end."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    action, observation = Text, Said

    def reset(self, seed=None, episode_id=None, question="10 to 24?") -> Said:
        self.game = built_in.Guess()
        self.game.reset(Problem(question, None, {"prompt": question}, seed))
        return Said(text=question)

    def step(self, action: Text, timeout_s=None) -> Said:
        step = self.game.step(action.message)
        if step.done:
            return Said(done=True, reward=self.game.score().score)
        return Said(text=step.observation)

    @property
    def state(self) -> State:
        return State()


class Echo(Environment):
    """Repeats each message. Three turns, each with a reward of the number of letters."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    action, observation = Text, Counted

    def reset(self, seed=None, episode_id=None) -> Counted:
        self.seed, self.episode, self.turns = seed, episode_id, 0
        return Counted(text=f"seed {seed}")

    def step(self, action: Text, timeout_s=None) -> Counted:
        if action.message == "raise":
            raise KeyError("no such door")
        self.turns += 1
        text = f"{self.seed} {len(self.episode)} {action.message}"
        return Counted(text=text, turns=self.turns, done=self.turns == 3, reward=len(action.message))

    @property
    def state(self) -> State:
        return State(episode_id=self.episode, step_count=self.turns)


class Range(Echo):
    """Takes two numbers."""

    action = Pair

    def step(self, action: Pair, timeout_s=None) -> Counted:
        return Counted(text=f"{action.high - action.low}", done=action.high > action.low, reward=True)


if __name__ == "__main__":
    kind, port, sessions = globals()[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    app = create_app(kind, kind.action, kind.observation, env_name=kind.__name__, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
