"""--environment openenv:URL: an environment that runs in a server of OpenEnv. common/data/openenv.py has the protocol.

A subclass in a file of yours changes one thing and keeps the rest:

    class Slow(OpenEnv):
        url = "http://127.0.0.1:8000"
        seconds = 300.0

        def text_of(self, observation):
            return observation["board"]
"""

import time

from common.data import openenv
from common.data.openenv import LOST, REJECTED, Answer, ServerError, Session
from common.errors import BadInput
from common.rollout.environments import Environment, Problem, Result, Step

# Share of `seconds` for which a call waits for the server. Otherwise the process would be killed with all its episodes.
PATIENCE = 0.9


class OpenEnv(Environment):
    """One episode is one session of the server, from reset to the end."""

    url = ""
    only_json = False  # True: each action is a JSON object that the policy writes
    seconds = 60.0  # as in OpenEnv's own client
    session: Session | None = None  # of this episode; it may have been closed for another one

    def reset(self, problem: Problem) -> None:
        """Begin a session. The reset gets the problem's seed, and what the row has under "reset"."""
        self.server = openenv.server_at(self.url)
        self.actions = openenv.Actions(self.server.action_schema, self.only_json)
        given = problem.meta.get("reset", {})
        if not isinstance(given, dict):
            raise BadInput(f'expected an object with arguments as "reset" of the row, got {given!r:.100}')
        # Some servers keep a seed in 32 bits with a sign.
        self.arguments = {"seed": problem.seed % 2**31, **given}
        # Actions that the server has taken, and its answers.
        self.turns: list[tuple[dict, Answer]] = []
        self.first: Answer | None = None
        self.keep(self.begin(time.monotonic() + PATIENCE * self.seconds))
        said = openenv.text_of(self.first.observation)
        if problem.meta.get("from_reset") and said != problem.meta["prompt"]:
            seed = self.arguments["seed"]
            raise BadInput(f"reset with the seed {seed} showed {problem.meta['prompt']!r:.200}, and now {said!r:.200}")
        # Unless the policy has read it in the prompt, it reads it before the first answer.
        shown = self.text_of(self.first.observation)
        self.unread = "" if shown.strip() in problem.prompt else f"{shown}\n"

    def step(self, text: str) -> Step:
        """Send an action. One that the server rejects is an error that the policy reads."""
        action = self.actions.of(text)
        if action is None:
            return self.observe(f"error: an action is a JSON object with the schema {self.actions.shown}", errors=1)
        try:
            answer = self.send(action, time.monotonic() + PATIENCE * self.seconds)
        except ServerError as error:
            if error.code != REJECTED:
                raise
            return self.observe(f"error: {error.said}", errors=1)
        if answer.done:
            return Step(done=True)
        return self.observe(self.text_of(answer.observation))

    def score(self) -> Result:
        """The sum of all steps' rewards. acc is 1 if the server has ended the episode with a reward above 0."""
        self.leave()
        rewards = [answer.reward for _, answer in self.turns]
        done = bool(self.turns) and self.turns[-1][1].done
        right = done and rewards[-1] > 0
        return Result(sum(rewards), float(right), None, {"rewards": rewards, "done": done})

    def text_of(self, observation: dict) -> str:
        """What the policy reads."""
        return openenv.text_of(observation)

    def observe(self, text: str, errors: int = 0) -> Step:
        unread, self.unread = self.unread, ""
        return Step(unread + text, errors=errors)

    def send(self, action: dict, until: float) -> Answer:
        """The answer to an action. A session that is no longer there is begun again."""
        session = self.session
        answer = None
        if self.server.take(session):
            try:
                answer = self.ask(session, action, until)
            except ServerError as error:
                # For example the server has been restarted. It has one more try.
                if error.code != LOST:
                    raise
        if answer is None:
            session = self.begin(until)
            answer = self.ask(session, action, until)
        self.turns.append((action, answer))
        if answer.done:
            session.close()
        else:
            self.keep(session)
        return answer

    def ask(self, session: Session, action: dict, until: float) -> Answer:
        try:
            return session.ask("step", action, until)
        except ServerError as error:
            # The session lives on.
            if error.code == REJECTED:
                self.keep(session)
            raise

    def begin(self, until: float) -> Session:
        """A new session with the turns so far. Raises BadInput if the server does not answer them as it did before."""
        session, first = self.server.begin(self.arguments, until)
        self.first = self.first or first
        self.compare(session, "reset", self.first, first)
        for number, (action, before) in enumerate(self.turns, 1):
            try:
                again = session.ask("step", action, until)
            except ServerError as error:
                if error.code != REJECTED:
                    raise
                again = error
            self.compare(session, f"turn {number}", before, again)
        return session

    def compare(self, session: Session, name: str, before: Answer, again: Answer | ServerError) -> None:
        if again != before:
            session.close()
            raise BadInput(f"{name} was answered by {before!r:.300}, and by {again!r:.300} when it was repeated")

    def keep(self, session: Session) -> None:
        self.session = session
        self.server.keep(session)

    def leave(self) -> None:
        """The episode is over: free its place on the server."""
        if self.session and self.server.take(self.session):
            self.session.close()

    def __del__(self):
        """Also of an episode that has failed, or whose class has another score()."""
        self.leave()


def class_of(spec: str) -> type[OpenEnv]:
    """The class of --environment openenv:URL. Raises BadInput."""
    parsed = openenv.parse(spec, "--environment")
    return type("OpenEnv", (OpenEnv,), {"url": parsed.url, "only_json": parsed.only_json})
