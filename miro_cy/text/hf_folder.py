"""The tokenizer of a Hugging Face folder: `tokenizer.json` or `tokenizer.model`, and what the files beside it say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from miro_client.checks import shown
from miro_cy.errors import ModelFormatError
from miro_cy.text.codec import Codec
from miro_cy.text.files import MAX_JSON_BYTES, MAX_TOKENS, read_object, read_text, typed
from miro_cy.text.hf_json import JsonCodec, Unusable
from miro_cy.text.specials import Special
from miro_cy.text.spm import SentencePieceCodec
from miro_cy.text.spm_file import SentencePieceFile, read_model
from miro_cy.text.vocabulary import END_OF_TURN, TokenType

#: The special tokens that chat templates know by name.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(slots=True)
class Folder:
    """What the files say. codec is None when there is no tokenizer, or none that miro can use; kind tells which."""

    kind: str = "none"
    codec: Codec | None = None
    vocab_size: int = 0
    bos_id: int | None = None
    add_bos: bool = False
    eos_ids: frozenset[int] = frozenset()
    template: str | None = None
    template_names: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)


def read_folder(path: Path) -> Folder:
    """Raises ModelFormatError naming the file, and the key, that is wrong."""
    config = read_object(path / "tokenizer_config.json")
    label = str(path / "tokenizer_config.json")
    named = _named(path, config, label)
    added = _added(path, config, label, named)
    folder = Folder(names={name: token for name, token in named.items() if token is not None})
    ids: dict[str, int] = {}
    if (path / "tokenizer.json").exists():
        ids = _from_json(folder, path / "tokenizer.json", added, config, label)
    elif (path / "tokenizer.model").exists():
        ids = _from_model(folder, path / "tokenizer.model", added, config, label, named)
    ends = {ids[token] for token in (folder.names.get("eos_token"), *END_OF_TURN) if token in ids}
    bos = ids.get(folder.names.get("bos_token", ""))
    for name in ("config.json", "generation_config.json"):
        source = read_object(path / name)
        nested = typed(source, "text_config", dict, str(path / name), {})
        for place in (source, nested):
            ends |= _ids(place, "eos_token_id", str(path / name))
            if bos is None:
                bos = min(_ids(place, "bos_token_id", str(path / name)), default=None)
    folder.bos_id = bos if folder.bos_id is None else folder.bos_id
    folder.eos_ids = frozenset(ends)
    _template(folder, path, config, label)
    return folder


def _from_json(
    folder: Folder, path: Path, added: list[Special], config: Mapping[str, Any], label: str
) -> dict[str, int]:
    """Special tokens by name."""
    try:
        codec = JsonCodec(path, added, folder.names.values())
    except Unusable as error:
        folder.kind = f"tokenizer.json/{error}"
        return {}
    folder.kind = f"tokenizer.json/{codec.model_type}"
    folder.codec, folder.vocab_size = codec, codec.vocab_size
    wanted = [*folder.names.values(), *(token.content for token in codec.header.added_tokens if token.special)]
    ids = {token: token_id for token in wanted if (token_id := codec.id_of(token)) is not None}
    # What the settings say counts more than the post-processor, as in transformers 4 and in what writes GGUF files;
    # transformers 5 asks the post-processor alone. It matters only where a folder contradicts itself.
    explicit = typed(config, "add_bos_token", bool, label)
    if explicit is None:
        folder.bos_id = codec.first_special()
        folder.add_bos = folder.bos_id is not None
    else:
        folder.add_bos = explicit and folder.names.get("bos_token") in ids
    return ids


def _from_model(
    folder: Folder,
    path: Path,
    added: list[Special],
    config: Mapping[str, Any],
    label: str,
    named: Mapping[str, str | None],
) -> dict[str, int]:
    file = read_model(path)
    folder.kind = "tokenizer.model" + (f"/{file.refused}" if file.refused else "")
    folder.vocab_size = len(file.pieces.tokens)
    folder.names |= {name: token for name, token in file.names.items() if name not in named}
    if file.refused:
        return {}
    pieces = file.pieces
    if pieces.prefix != "never":
        always = typed(config, "legacy", bool, label, False)
        prefix = typed(config, "add_prefix_space", bool, label, True)
        pieces = replace(pieces, prefix=("always" if always else "first") if prefix else "never")
    specials = _merged(file, added)
    folder.codec = SentencePieceCodec(pieces, specials)
    folder.vocab_size = folder.codec.vocab_size
    ids = {special.text: special.id for special in specials if special.control}
    folder.add_bos = typed(config, "add_bos_token", bool, label, True) and folder.names.get("bos_token") in ids
    return ids


def _merged(file: SentencePieceFile, added: list[Special]) -> list[Special]:
    """The model's control tokens and those that the files beside it add, or say more about."""
    tokens, types = file.pieces.tokens, file.pieces.types
    specials = {
        i: Special(tokens[i], i, control=True)
        for i, kind in enumerate(types)
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN)
    }
    specials |= {special.id: special for special in added}
    return list(specials.values())


def _named(path: Path, config: Mapping[str, Any], label: str) -> dict[str, str | None]:
    """bos_token and so on, as far as a file speaks of them; None: it says that there is none."""
    others = read_object(path / "special_tokens_map.json")
    named: dict[str, str | None] = {}
    for name in NAMES:
        for source, where in ((config, label), (others, str(path / "special_tokens_map.json"))):
            if name in source:
                named[name] = _content(source[name], name, where)
                break
    return named


def _content(value: Any, name: str, label: str) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ModelFormatError(f"{label}: {name!r} must be a string, not {shown(value)}")
    return _unicode(value, name, label) if value is not None else None


def _unicode(value: str, name: str, label: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ModelFormatError(f"{label}: {name!r} is not valid Unicode") from None
    return value


def _added(path: Path, config: Mapping[str, Any], label: str, named: Mapping[str, str | None]) -> list[Special]:
    """Added tokens of tokenizer_config.json, else of added_tokens.json."""
    entries = typed(config, "added_tokens_decoder", dict, label)
    if entries is None:
        where = str(path / "added_tokens.json")
        simple = read_object(path / "added_tokens.json")
        special = {token for token in named.values() if token} | set(END_OF_TURN)
        return [
            Special(_unicode(text, "token", where), _id(token_id, repr(text)[:80], where), control=text in special)
            for text, token_id in simple.items()
        ]
    found = []
    for key, entry in entries.items():
        if not isinstance(entry, dict) or not key.isdecimal() or len(key) > 10:
            raise ModelFormatError(f"{label}: added token {shown(key)} must be a number with an object")
        text = _unicode(typed(entry, "content", str, label, ""), "content", label)
        flags = {name: typed(entry, name, bool, label, False) for name in ("special", "lstrip", "rstrip")}
        found.append(
            Special(
                text,
                _id(int(key), key, label),
                control=flags["special"],
                lstrip=flags["lstrip"],
                rstrip=flags["rstrip"],
            )
        )
    return [special for special in found if special.text]


def _id(value: Any, name: str, label: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_TOKENS:
        raise ModelFormatError(f"{label}: {name}: a token id must be an integer below {MAX_TOKENS}, not {shown(value)}")
    return value


def _ids(source: Mapping[str, Any], key: str, label: str) -> set[int]:
    """A token id, or a list of them; null and -1 stand for none."""
    value = source.get(key)
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    return {_id(item, repr(key), label) for item in values if item is not None and item != -1}


def _template(folder: Folder, path: Path, config: Mapping[str, Any], label: str) -> None:
    """chat_template.jinja, else the string in tokenizer_config.json, else the "default" of its named ones."""
    if (path / "chat_template.jinja").exists():
        folder.template = read_text(path / "chat_template.jinja", MAX_JSON_BYTES)
        return
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {}
        for item in value:
            if not isinstance(item, dict):
                raise ModelFormatError(f"{label}: 'chat_template' must list objects, not {shown(item)}")
            named[typed(item, "name", str, label, "")] = typed(item, "template", str, label, "")
        value = named
    if isinstance(value, dict):
        folder.template = typed(value, "default", str, label)
        folder.template_names = tuple(sorted(map(str, value)))
    elif value is not None:
        folder.template = typed(config, "chat_template", str, label)
