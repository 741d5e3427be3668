"""Conversations as token ids: the tokens between two turns, without encoding again what the policy sampled."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import RolloutConfigError
from ..samples import IntArray, id_list
from .environment_process import Message

_MARK = "plinth-mark-of-a-turn"


class ChatTemplateError(RolloutConfigError):
    """The tokenizer's chat template cannot continue a conversation."""


class ChatFormat:
    """Turns messages into token ids in the format of a tokenizer.

    With a chat template, the tokens between two turns are those that the template puts there: the difference between
    the conversation up to the question and the conversation with the answer and the new messages. Without one, texts
    are joined as they are, and a message is its content and a line break.

    Parts of `type` image with a file in `image` need `vision`, the token ids of a text with these images.

    tokenizer: a transformers tokenizer. with_template: use its chat template; None: if it has one. template_kwargs:
    further arguments of the template, such as enable_thinking.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        with_template: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        vision: Callable[[str, Sequence[str]], Sequence[int]] | None = None,
    ) -> None:
        self._vision = vision
        self._tokenizer = tokenizer
        self._with_template = bool(tokenizer.chat_template) if with_template is None else with_template
        self._template_kwargs = dict(template_kwargs or {})
        self._end_ids = frozenset(map(int, tokenizer.all_special_ids))

    def prompt_ids(self, prompt: str | Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Token ids of a prompt up to the start of the policy's turn. Text is the message of a user.

        Raises ChatTemplateError if the template does not take these messages, or there are tools and no template.
        """
        if not self._with_template:
            if tools:
                raise ChatTemplateError("the tokenizer has no chat template, or it is turned off", field="tools")
            return self._encode(_plain(prompt), add_special_tokens=True, images=images_of(prompt))
        messages = _as_messages(prompt)
        return self._encode(self._render(_as_parts(messages), tools), images=images_of(messages))

    def text(self, turn_ids: Sequence[int] | IntArray) -> str:
        """The text of a turn, without the special token that ends it."""
        ids = id_list(turn_ids)
        while ids and ids[-1] in self._end_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def context_ids(
        self, turn_ids: Sequence[int] | IntArray, new: str | Sequence[Message], tools: Sequence[Message] = ()
    ) -> list[int]:
        """Token ids from the end of a turn to the start of the policy's next one, with the messages `new` in between.

        turn_ids: the ids of the turn. If its last one ends the turn, as the template would, it is not repeated.
        Raises ChatTemplateError if the template changes what precedes the turn, or does not take the messages.
        """
        if not self._with_template:
            return self._encode(_plain(new), images=images_of(new))
        question = [{"role": "user", "content": "question"}]
        answer = [{"role": "assistant", "content": _MARK}]
        whole = _as_parts([*question, *answer, *_as_messages(new)])
        before = self._render(whole[:1], tools, add_generation_prompt=False)
        after = self._render(whole, tools)
        if not after.startswith(before) or after.count(_MARK) != 1:
            roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in _as_messages(new)))
            raise self._template_error(
                f"it changes earlier turns when a message of role {roles} follows, so the conversation cannot be "
                "continued token by token"
            )
        ids = self._encode(after.partition(_MARK)[2], images=images_of(new))
        ends_alike = ids and len(turn_ids) and ids[0] == turn_ids[-1] and ids[0] in self._end_ids
        return ids[1:] if ends_alike else ids

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_kwargs,
            )
        except Exception as error:  # templates raise jinja2 errors, TypeErrors, KeyErrors, ...
            roles = ", ".join(str(message.get("role")) for message in messages)
            problem = f"it refuses messages of the roles {roles}: {' '.join(str(error).split())[:200]}"
            raise self._template_error(problem) from error
        return str(text)

    def _template_error(self, problem: str) -> ChatTemplateError:
        name = self._tokenizer.name_or_path or "the tokenizer"
        return ChatTemplateError(problem, field="chat_template", value=name)

    def _encode(self, text: str, *, add_special_tokens: bool = False, images: Sequence[str] = ()) -> list[int]:
        if images:
            if self._vision is None or not self._with_template:
                problem = "images need the template and the processor of a vision-language model"
                raise ChatTemplateError(problem, field="vision")
            return list(self._vision(text, images))
        return list(map(int, self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]))


def _as_messages(new: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "user", "content": new}] if isinstance(new, str) else new


def images_of(new: str | Sequence[Message] | None) -> list[str]:
    """The files of the images in messages, in order."""
    contents = [message.get("content") for message in new or () if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if part.get("type") == "image"]


def _as_parts(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, all contents as parts if one has an image, as templates of vision-language models expect them."""
    if not images_of(messages):
        return messages
    contents = [message["content"] for message in messages]
    parts = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents]
    return [{**message, "content": part} for message, part in zip(messages, parts, strict=True)]


def _plain(new: str | Sequence[Message]) -> str:
    return new if isinstance(new, str) else "".join(f"{message['content']}\n" for message in new)
