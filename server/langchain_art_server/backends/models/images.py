"""Images for a text model inside of a vision model: the embeddings of their tokens.

The model's own processor, vision tower and projector make them, one image at a time, so that they
do not depend on other images. In the text model they take the place of the input embeddings of the
image's ids (`image_tokens`), and everything behind these goes as for a text: caches, batches, the
forest. Where a model has positions of three dimensions, or the tokens of an image attend to each
other, passes are told so (`Images.shifts`). `Images.why_not` tries that against the model's own
way, since some models do more.
"""

from __future__ import annotations

import inspect
import io
import threading
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoProcessor, PreTrainedModel
from transformers.processing_utils import ProcessorMixin

from langchain_art.errors import ArtError, InvalidRequest
from langchain_art_server.algorithms.sequences.image_tokens import IMAGE_IDS, image_token_ids
from langchain_art_server.algorithms.sequences.prefix_forest import Ints
from langchain_art_server.backends.models.base_weights import language_model, text_modules

_MAX_KEPT = 64 << 20  # bytes of embeddings that are kept for images that come again
_PROBE = "zq"


@dataclass(frozen=True, eq=False)
class Image:
    """An image as a model reads it."""

    text: str  # what the processor writes in place of the placeholder
    ids: list[int]  # of the tokens in it that have the image's embeddings
    embeddings: Tensor
    """Those of these tokens (T, H), on the CPU; behind them what the first layers add to theirs."""
    shifts: Ints | None  # see `position_shifts`; None: its tokens are as those of a text

    @property
    def nbytes(self) -> int:
        """Bytes that are kept of it."""
        return self.embeddings.nbytes


class Images:
    """Reader of images for a model. Several threads may `read`; one runs the model.

    Attributes:
        placeholder: the text by which a chat template says that there is an image.
        token: the tokenizer's id of an image's tokens.
        whole: the tokens of an image attend to each other.
    """

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        self._model: Any = model
        with without_videos():
            self._processor: Any = cast(Any, AutoProcessor).from_pretrained(
                name, backend="pil", trust_remote_code=False
            )
        # The attribute is a text or a tokenizer's AddedToken.
        self.placeholder = str(self._processor.image_token)
        self.token: int = self._model.config.image_token_id
        text = text_modules(model)
        #: The vision model; the text model's attention may be one of ours, which it cannot have.
        self._towers = [
            one
            for one in model.modules()
            if isinstance(one, PreTrainedModel) and text.isdisjoint(one.modules())
        ]
        self._takes = inspect.signature(self._model.get_image_features).parameters
        self.whole = "token_type_ids" in inspect.signature(self._model.forward).parameters
        #: The model's own way to positions of three dimensions; None: it has none.
        self._place = getattr(model.base_model, "get_rope_index", None)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Image] = OrderedDict()
        self._size = 0
        #: Images that passes through the model may have, and how many need each.
        self._held = Counter[Image]()
        self._table: tuple[Tensor, Tensor] | None = None
        self._found: tuple[Tensor, Tensor] | None = None
        self._deeper: dict[str, Any] = {}
        embeddings, reads = self._model.get_input_embeddings(), language_model(model)
        self._width: int = embeddings.weight.shape[1]
        embeddings.register_forward_pre_hook(self._without_images)
        embeddings.register_forward_hook(self._with_images)
        if "deepstack_visual_embeds" in inspect.signature(reads.forward).parameters:
            reads.register_forward_pre_hook(self._with_deeper, with_kwargs=True)

    def read(self, digest: str, body: bytes, tenant: str = "") -> Image:
        """Read a tenant's image. Raises InvalidRequest: it cannot be decoded."""
        key = tenant, digest
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
            image = self._kept[key] = self._read(digest, body)
            self._size += image.nbytes
            while self._size > _MAX_KEPT and len(self._kept) > 1:
                self._size -= self._kept.popitem(last=False)[1].nbytes
            return image

    @torch.no_grad()
    def _read(self, digest: str, body: bytes) -> Image:
        inputs = self._inputs(self.placeholder, body)
        ids: list[int] = inputs["input_ids"][0].tolist()
        text = self._processor.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        pixels = {name: one for name, one in inputs.items() if name in self._takes}
        for tower in self._towers:
            has_sdpa = getattr(tower, "_supports_sdpa", False)
            tower.set_attn_implementation("sdpa" if has_sdpa else "eager")
        found = self._model.get_image_features(**pixels)
        levels = [getattr(found, "pooler_output", found)]
        levels += getattr(found, "deepstack_features", None) or []
        embeddings = torch.cat([_flat(level) for level in levels], 1).cpu()
        if len(embeddings) != ids.count(self.token):
            raise ArtError(
                f"The model made {len(embeddings)} embeddings of an image, for which its processor "
                f"writes {ids.count(self.token)} tokens; their files do not fit each other."
            )
        shifts = self._own_shifts(inputs, np.asarray(ids) == self.token)
        return Image(text, image_token_ids(digest, len(embeddings)), embeddings, shifts)

    def _own_shifts(self, inputs: dict[str, Tensor], is_image: Any) -> Ints | None:
        """The `position_shifts` from the first token of an image to behind its last."""
        if self._place is None and not self.whole:
            return None
        found, at = np.zeros((4, len(is_image) + 1), dtype=np.int64), np.arange(len(is_image))
        if self._place is not None:
            takes = inspect.signature(self._place).parameters
            own, behind = self._place(**{k: v for k, v in inputs.items() if k in takes})
            found[:3, :-1] = own[:, 0].cpu().numpy() - at
            found[:3, -1] = behind.item()
        edges = np.flatnonzero(np.diff(is_image, prepend=False, append=False)).reshape(-1, 2)
        for start, end in edges.tolist() if self.whole else ():
            found[3, start:end] = end - 1 - at[start:end]
        return np.concatenate([found[:, edges[0, 0] : edges[-1, 1]], found[:, -1:]], 1)

    def _inputs(self, text: str, body: bytes) -> dict[str, Tensor]:
        inputs = self._processor(
            text=[text], images=[decoded(body)], return_tensors="pt", add_special_tokens=False
        )
        model = self._model
        return {
            name: one.to(model.device, model.dtype if one.is_floating_point() else None)
            for name, one in inputs.items()
        }

    def hold(self, images: Iterable[Image]) -> None:
        """Let passes have images, until `let_go` is called as often."""
        for image in images:
            self._held[image] += 1
            self._table = None

    def let_go(self, images: Iterable[Image]) -> None:
        """See `hold`."""
        for image in images:
            self._held[image] -= 1
            if not self._held[image]:
                del self._held[image]
                self._table = None

    def shifts(self, ids: Sequence[int]) -> Ints | None:
        """The `position_shifts` of tokens whose images are held; None: there are none."""
        own = {image.ids[0]: image.shifts for image in self._held if image.shifts is not None}
        return position_shifts(ids, own) if own and max(ids) >= IMAGE_IDS else None

    def kinds(self, ids: Tensor) -> dict[str, Tensor]:
        """Token types of whole sequences, by which the tokens of an image attend to each other."""
        return {"token_type_ids": (ids >= IMAGE_IDS).long()} if self.whole else {}

    def _without_images(self, _module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Find the ids of images, for which the embedding has no rows."""
        self._found, self._deeper = None, {}
        if not self._held:
            return None
        ids, *more = args
        image_P = ids >= IMAGE_IDS
        if not image_P.any():
            return None
        if self._table is None:
            known = torch.tensor([one for image in self._held for one in image.ids])
            order = known.argsort()
            rows = torch.cat([image.embeddings for image in self._held])
            self._table = known[order], rows[order]
        known, rows = self._table
        wanted = ids[image_P].cpu()
        at = torch.searchsorted(known, wanted).clamp_(max=len(known) - 1)
        if not known[at].equal(wanted):
            raise ArtError("The tokens of an image came to the model without the image.")
        self._found = image_P, rows[at].to(ids.device)
        return (ids.masked_fill(image_P, 0), *more)

    def _with_images(self, _module: Any, _args: Any, out: Tensor) -> Tensor | None:
        found, self._found = self._found, None
        if found is None:
            return None
        image_P, rows = found
        rows, *deeper = rows.split(self._width, 1)
        if deeper:
            self._deeper = {"visual_pos_masks": image_P, "deepstack_visual_embeds": deeper}
        return out.masked_scatter(image_P[..., None], rows.to(out.dtype))

    def _with_deeper(
        self, _module: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the text model what its first layers add to the tokens of images."""
        return args, options | self._deeper

    @torch.no_grad()
    def why_not(self, body: bytes) -> str:
        """Reason why the model reads an image in another way than a text; empty: it does not."""
        inputs = self._inputs(_PROBE + self.placeholder + _PROBE, body)
        plain = self._model(**inputs, use_cache=False).logits
        image = self._read("", body)
        ids = inputs["input_ids"].clone()
        ids[ids == self.token] = torch.tensor(image.ids, device=ids.device)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        self.hold([image])
        try:
            if self._place is not None and (shifts := self.shifts(ids[0].tolist())) is not None:
                positions = positions + torch.from_numpy(shifts[:3, None, :-1]).to(ids.device)
            found = self._model(
                input_ids=ids, position_ids=positions, use_cache=False, **self.kinds(ids)
            ).logits
        finally:
            self.let_go([image])
        gap = (found - plain).float().abs().max().item()
        if gap <= (1e-3 if plain.dtype == torch.float32 else 0.1) * plain.float().std().item():
            return ""
        return (
            "the tokens of its images are more than embeddings with positions, or attend to each "
            f"other in a way that is not implemented here (its logits differ by {gap:.2g})"
        )


def position_shifts(ids: Sequence[int], images: Mapping[int, Ints]) -> Ints:
    """Distances of tokens (T), and of the one that follows, from their indices; for images.

    In three dimensions, for models whose images have a place in time, height and width: the tokens
    of an image are in a grid, and what follows stands behind its longest side, however many tokens
    it has. And how far the last token is that an image's tokens attend to, where these attend to
    each other.

    Args:
        ids: tokens of a sequence, from its first one on.
        images: the same of each image alone, by the id of its first token.

    Returns:
        Shifts (4, T + 1). An image of 2 x 2 tokens behind one of text, and another of text::

            index    0   1   2   3   4   5   6
            time     0   0  -1  -2  -3  -2  -2
            height   0   0  -1  -1  -2  -2  -2
            width    0   0   0  -2  -2  -2  -2
            last     0   3   2   1   0   0   0
    """
    found, end = np.zeros((4, len(ids) + 1), dtype=np.int64), 0
    for at in np.flatnonzero(np.asarray(ids) >= IMAGE_IDS).tolist():
        if at >= end:
            own = images[ids[at]]
            end = at + own.shape[1] - 1
            found[:, at:end] += own[:, :-1]
            found[:, end:] += own[:, -1:]
    return found


def placed(positions: Ints, row: int, at: Ints, shifts: Ints | None) -> Ints:
    """Positions (R, T), or in three dimensions (3, R, T), with those of a row with images.

    `positions` are changed if they have three dimensions. `at` are the columns of the row's tokens,
    from its first one on, and `shifts` its `position_shifts`.
    """
    if shifts is None or not shifts[:3].any():
        return positions
    if positions.ndim == 2:
        positions = np.tile(positions, (3, 1, 1))
    positions[:, row, at] = np.arange(len(at)) + shifts[:3, : len(at)]
    return positions


@contextmanager
def without_videos() -> Generator[None]:
    """Let transformers make processors without their parts for videos, which need torchvision."""
    own: Any = vars(ProcessorMixin)["get_attributes"]

    def get_attributes(cls: Any) -> list[str]:
        return [name for name in own.__func__(cls) if name != "video_processor"]

    setattr(ProcessorMixin, "get_attributes", classmethod(get_attributes))  # noqa: B010
    try:
        yield
    finally:
        setattr(ProcessorMixin, "get_attributes", own)  # noqa: B010


def _flat(level: Any) -> Tensor:
    parts = level if isinstance(level, list | tuple) else [level]
    return torch.cat([part.flatten(0, -2) for part in parts])


def images_of(
    name: str, model: Any, tokenizer: Any = None, reader: type[Images] = Images
) -> Images | str:
    """The reader of images for a model, or the reason why there is none, in words.

    Without a `tokenizer`, whose chat template says where an image is, that is not looked at.
    """
    kind = type(model).__name__
    if language_model(model) is model or not hasattr(model, "get_image_features"):
        return f"{kind} reads text only"
    try:
        images = reader(name, model)
        said = [{"role": "user", "content": [{"type": "image"}]}]
        shown: str = (
            tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            if tokenizer
            else images.placeholder + "."
        )
        if shown.count(images.placeholder) != 1 or shown.endswith(images.placeholder):
            return (
                f"its chat template does not write {images.placeholder!r} for an image, with text "
                "behind it"
            )
        why = images.why_not(probe_image())
    except ImportError as error:
        words = " ".join(str(error).split())
        return f'its processor cannot be loaded: {words} (pip install "langchain-art[images]")'
    except Exception as error:  # noqa: BLE001 - whatever the folder's files make transformers raise
        words = " ".join(str(error).split())
        return f"its processor cannot show one: {type(error).__name__}: {words}"
    return why or images


def probe_image() -> bytes:
    """An image of noise, which is tried at the start."""
    from PIL import Image as pil  # noqa: PLC0415 - an extra's

    noise = torch.randint(256, (32 * 48 * 3,), generator=torch.Generator().manual_seed(0))
    file = io.BytesIO()
    pil.frombytes("RGB", (48, 32), bytes(noise.tolist())).save(file, "PNG")
    return file.getvalue()


def decoded(body: bytes) -> Any:
    """An image's pixels, as PIL has them. Raises InvalidRequest: it cannot be decoded."""
    from PIL import Image as pil  # noqa: PLC0415 - an extra's
    from PIL import ImageOps  # noqa: PLC0415 - an extra's

    try:
        with pil.open(io.BytesIO(body)) as image:
            return cast(Any, ImageOps.exif_transpose(image)).convert("RGB")
    except (OSError, ValueError, SyntaxError, pil.DecompressionBombError) as error:
        raise InvalidRequest(
            f"got an image that cannot be decoded: {error}.", param="messages"
        ) from error
