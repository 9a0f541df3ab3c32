"""A small environment of OpenEnv, served by OpenEnv."""

from __future__ import annotations

import random
import threading
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    guess: int


class Hint(Observation):
    text: str


class Numbers(Environment):
    """Two guesses at a number from 0 to 5: the second is worth .5, a right one 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: object) -> Hint:
        self.number, self.guesses = random.Random(seed).randrange(6), 0
        return Hint(text="Guess a number from 0 to 5.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: object) -> Hint:
        self.guesses += 1
        right = action.guess == self.number
        said = "Right." if right else "Higher." if action.guess < self.number else "Lower."
        return Hint(text=said, reward=right / self.guesses, done=right or self.guesses == 2)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)


def serve(port: int) -> None:
    """Serve from now on, in a thread."""
    app = create_app(Numbers, Guess, Hint, env_name="numbers", max_concurrent_envs=64)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
