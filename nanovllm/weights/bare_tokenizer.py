"""A tokenizer of the package `tokenizers`, without transformers, whose import takes longer than the rest of a start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.quiet_import import quiet_imports

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase


class BareTokenizer:
    """What the engine needs of a tokenizer; the rest is transformers' tokenizer's, which is made when it is asked for.

    Texts and ids are those of `PreTrainedTokenizerFast(tokenizer_object=tokenizer, ...)`.

    Args:
        tokenizer: it belongs to this object from now on.
        special: transformers' names of special tokens ("bos_token", "eos_token", "unk_token", "pad_token") -> token.
        chat_template: a Jinja template, or None.
        name_or_path: where it comes from.

    Attributes:
        backend_tokenizer: the tokenizer.
        name_or_path: as given.
    """

    def __init__(
        self, tokenizer: Tokenizer, special: Mapping[str, str | None], chat_template: str | None, name_or_path: str = ""
    ) -> None:
        from tokenizers import AddedToken

        self.backend_tokenizer = tokenizer
        self.name_or_path = name_or_path
        self._special = {name: token for name, token in special.items() if token is not None}
        self._chat_template = chat_template
        self._whole: PreTrainedTokenizerBase | None = None
        # A named token is special, whatever else the file says of it.
        added = {token.content for token in self.added_tokens_decoder.values()}
        missing = [token for token in dict.fromkeys(self._special.values()) if token not in added]
        tokenizer.add_tokens([AddedToken(token, special=True) for token in missing])

    def whole(self) -> PreTrainedTokenizerBase:
        """transformers' tokenizer, with a copy of this one inside. Always the same object."""
        if self._whole is None:
            with quiet_imports():
                from transformers import PreTrainedTokenizerFast

            self._whole = PreTrainedTokenizerFast(
                tokenizer_object=self.backend_tokenizer, chat_template=self._chat_template,
                clean_up_tokenization_spaces=False, name_or_path=self.name_or_path, **self._special,
            )  # fmt: skip
        return self._whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole()(*args, **kwargs)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """The template, which a user may have changed in transformers' tokenizer."""
        return self._chat_template if self._whole is None else self._whole.chat_template  # type: ignore[return-value]

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        self._chat_template = template
        if self._whole is not None:
            self._whole.chat_template = template

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that are found in a text as they are, by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def eos_token_id(self) -> int | None:
        """The end token that the file names."""
        token = self._special.get("eos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text's token ids."""
        # `encode` keeps every other thread of the process waiting, for seconds if the text is long.
        (found,) = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """The text of token ids. Spaces are never tidied up."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        """The vocabulary's names of token ids; None for an id that it does not have."""
        name: Callable[[int], str | None] = self.backend_tokenizer.id_to_token
        return name(ids) if isinstance(ids, int) else [name(int(token)) for token in ids]


def whole_tokenizer(tokenizer: Any) -> Any:
    """transformers' tokenizer of one that `load_tokenizer` gave; None of None."""
    return tokenizer.whole() if isinstance(tokenizer, BareTokenizer) else tokenizer


def check_template(text: str, where: str) -> None:
    """A ValueError unless a chat template is a Jinja template, as transformers reads one.

    Args:
        where: what holds the template, for the message.
    """
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        """`{% generation %}` marks what the model writes."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        Environment(extensions=[GenerationTag, "jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"{where} is no Jinja template: {error.message}, in line {error.lineno}; correct it or remove it"
        ) from error
