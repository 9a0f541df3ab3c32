"""Images for vLLM, which makes their embeddings itself.

vLLM is sent one placeholder for an image, and its pixels as they were decoded here: its own reader
would make other ones of transparent or turned images. It writes the image's tokens in place of the
placeholder, as the model's processor does here; `VllmHost` compares them.
"""

from __future__ import annotations

import io
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from pybase64 import b64encode_as_string
from transformers import PreTrainedModel

from langchain_art.errors import InvalidRequest
from langchain_art_server.algorithms.sequences.image_tokens import IMAGE_IDS, image_token_ids
from langchain_art_server.backends.models.images import Image, Images, decoded
from langchain_art_server.backends.vllm.client import with_images

#: Prints whether a vLLM has the option that opens its route for tokens with images.
_HAS_ROUTE = """
import importlib.util, pathlib
vllm = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
files = vllm.glob("entrypoints/**/cli_args.py")
print(any("enable_scale_out" in one.read_text(encoding="utf-8") for one in files))
"""


@dataclass(frozen=True, eq=False)
class SentImage(Image):
    """An image as vLLM is sent it; there are no embeddings of it here."""

    embeddings: torch.Tensor = field(default_factory=lambda: torch.empty(0), init=False)
    shifts: None = field(default=None, init=False)
    whole: list[int]  # all tokens of its `text`
    url: str  # its pixels

    @property
    def nbytes(self) -> int:
        """See `Image`."""
        return len(self.url)


class SentImages(Images):
    """Reader of images for a model that vLLM runs; `mark` is the placeholder's token."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        super().__init__(name, model)
        self.mark: int = self._processor.tokenizer.convert_tokens_to_ids(self.placeholder)

    def why_not(self, body: bytes) -> str:
        """Reason why vLLM cannot read them as the learner does, which compares with the model.

        vLLM gives the option that has it resize so (``--mm-processor-kwargs``) to a processor of
        videos, too, which then cannot be made: it would not start.
        """
        if "video_processor" not in type(self._processor).get_attributes():
            return ""
        return "vLLM resizes them unlike the learner where a model reads videos, too"

    def _read(self, digest: str, body: bytes) -> SentImage:
        picture, file = decoded(body), io.BytesIO()
        picture.save(file, "PNG", compress_level=1)
        made = self._processor(text=[self.placeholder], images=[picture], add_special_tokens=False)
        whole: list[int] = list(made["input_ids"][0])
        own = image_token_ids(digest, whole.count(self.token))
        rest = iter(own)
        return SentImage(
            text=self._processor.tokenizer.decode(whole, clean_up_tokenization_spaces=False),
            ids=own,
            whole=[next(rest) if one == self.token else one for one in whole],
            url=f"data:image/png;base64,{b64encode_as_string(file.getvalue())}",
        )

    def written(self, ids: Sequence[int]) -> list[int]:
        """A prompt as vLLM writes it: all tokens of images have one id."""
        return [self.token if one >= IMAGE_IDS else one for one in ids]

    def body(
        self, body: dict[str, Any], images: Mapping[str, Image], tenant: str = ""
    ) -> dict[str, Any]:
        """A completion's body with a placeholder for each image in its prompt, and the images.

        Raises InvalidRequest: there are other placeholders, for which vLLM would take an image.
        """
        ids: list[int] = body["prompt"]
        first = {image.ids[0]: name for name, image in images.items()}
        sent, shown, at = list[int](), list[tuple[str, str]](), 0
        for place, id_ in enumerate(ids):
            if (name := first.get(id_)) is None:
                continue
            image = cast(SentImage, images[name])
            start = place - image.whole.index(id_)
            sent += [*ids[at:start], self.mark]
            # Names are those of vLLM's caches: per tenant, as `cache_salt`.
            shown.append((f"{tenant}/{name}", image.url))
            at = start + len(image.whole)
        sent += ids[at:]
        if sent.count(self.mark) != len(shown):
            raise InvalidRequest(
                f"got an earlier reply in which {self.placeholder!r} was sampled, and vLLM would "
                "show an image in its place; leave that reply out.",
                param="messages",
            )
        return with_images(body | {"prompt": sent}, shown)


def route_lacks(python: Path) -> str:
    """Reason why a vLLM takes no images, in words; empty: it does."""
    done = subprocess.run([python, "-c", _HAS_ROUTE], capture_output=True, text=True)
    lacks = "its vLLM has no route that takes tokens and images (--enable-scale-out; 0.31 has it)"
    return lacks if done.stdout.strip() == "False" else ""
