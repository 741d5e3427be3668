"""The token ids of an agent's requests: what the policy sampled stays as it is, only new messages are encoded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..samples import id_list
from .chat import ChatFormat, ChatTemplateError
from .environment_process import Message
from .tree import EpisodeTree


@dataclass(eq=False)
class _Node:
    """A message after those above it. thoughts: that belong to it. turn: in the tree of the episode, if the policy
    sampled the message."""

    thoughts: str = ""
    turn: int | None = None
    after: dict[str, list["_Node"]] = field(default_factory=dict)


class Conversations:
    """All conversations of an episode, as a tree of messages.

    Messages are the same if role, text without space around it, calls and the id of the answered call are; some agents
    send back the calls without the text. Thoughts that an agent does not send back stay.
    """

    def __init__(self, chat: ChatFormat, tree: EpisodeTree) -> None:
        self._chat, self._tree = chat, tree
        self._roots: dict[str, _Node] = {}

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """The tokens of a request: those of the longest conversation that it continues, then the new messages.

        Raises ChatTemplateError if the chat template does not take the messages.
        """
        turn, count = None, 0
        nodes = [self._roots[_key(tools)]] if _key(tools) in self._roots else []
        for number, message in enumerate(messages, 1):
            nodes = [node for above in nodes for node in _same(above, message)]
            for node in nodes:
                if node.turn is not None:
                    turn, count = self._tree.turns[node.turn], number
        if turn is not None:
            try:
                context = self._chat.context_ids(turn.sample.response_ids, messages[count:], tools)
                return [*id_list(turn.token_ids), *context]
            except ChatTemplateError:
                pass  # it writes earlier turns in another way when these messages follow: that is a branch
        return self._chat.prompt_ids(messages, tools)

    def add(self, messages: Sequence[Message], tools: Sequence[Message], reply: Message, turn: int) -> None:
        """Notes the message that the agent got for a turn of the policy."""
        node = self._roots.setdefault(_key(tools), _Node())
        for message in messages:
            known = node.after.setdefault(_head(message), [])
            node = next(iter(_same(node, message)), None) or _Node(thoughts=_thoughts(message))
            if node not in known:
                known.append(node)
        leaf = _Node(thoughts=_thoughts(reply), turn=turn)
        node.after.setdefault(_head(reply), []).append(leaf)
        if _calls(reply) and _text(reply):
            node.after.setdefault(_head({**reply, "content": ""}), []).append(leaf)


def _same(node: _Node, message: Message) -> list[_Node]:
    """The nodes after `node` that the message can be."""
    thoughts = _thoughts(message)
    return [one for one in node.after.get(_head(message), []) if not thoughts or thoughts == one.thoughts]


def _thoughts(message: Message) -> str:
    return str(message.get("reasoning_content") or "").strip()


def _head(message: Message) -> str:
    """The parts of a message that equal messages share."""
    return _key([message.get("role"), _text(message), _calls(message), message.get("tool_call_id")])


def _text(message: Message) -> str:
    return str(message.get("content") or "").strip()


def _calls(message: Message) -> list[tuple[Any, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(function["name"], function["arguments"]) for function in functions]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
