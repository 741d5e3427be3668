"""Router replay in a run: its demands on other settings."""

from ..config import BUILTIN_MODEL
from ..rules import Feature, only

ROUTER_REPLAY = Feature(
    key="actor.router_replay",
    is_on=lambda c: c.actor.router_replay != "off",
    rules=(
        only(
            "actor.router_replay",
            "off",
            when=lambda c: c.model.path == BUILTIN_MODEL,
            why="and the built-in model is no mixture of experts",
        ),
        only(
            "rollout.routes",
            True,
            None,
            when=lambda c: c.actor.router_replay == "R3",
            why="which replays the routes of the servers",
        ),
    ),
)
