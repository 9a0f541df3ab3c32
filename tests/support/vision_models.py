"""Small random models that read images, with their processors, and images for them."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from PIL import Image

from langchain_art_server.backends.models.base_weights import auto_class
from tests.support.families import VISION
from tests.support.tiny_models import SMALL, tokenizer

#: ChatML, with the placeholder of an image where its part stands.
TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{%- for part in message.content %}"
    "{%- if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{%- endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Special tokens behind the tokenizer's own.
_TOKENS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
VISION_FAMILIES = ("LLaVA", "SmolVLM")


def save_vision_model(folder: Path, family: str = "LLaVA", **text: Any) -> Path:
    """Write a random model of a family, the same every time; `text` changes its text model."""
    known = copy.deepcopy(tokenizer())
    known.add_special_tokens({"additional_special_tokens": list(_TOKENS)})
    known.chat_template = TEMPLATE
    shape: dict[str, Any] = SMALL | {"model_type": "llama"} | text
    image: Any = known.convert_tokens_to_ids("<image>")
    processor: Any
    config: Any
    if family == "LLaVA":
        size = {"height": 28, "width": 28}
        processor = transformers.LlavaProcessor(
            image_processor=transformers.CLIPImageProcessorPil(
                size=size, crop_size=size, do_center_crop=False
            ),
            tokenizer=known,
            patch_size=14,
            vision_feature_select_strategy="default",
            image_token="<image>",
            num_additional_image_tokens=1,
        )
        vision = VISION | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
        config = cast(Any, transformers.LlavaConfig)(
            vision_config=vision,
            text_config=shape,
            image_token_id=image,
            image_token_index=image,
            vision_feature_layer=-1,
            tie_word_embeddings=False,
        )
    else:
        processor = transformers.Idefics3Processor(
            image_processor=transformers.Idefics3ImageProcessorPil(
                size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
            ),
            tokenizer=known,
            image_seq_len=4,
        )
        vision = VISION | {"model_type": "idefics3_vision", "image_size": 28, "patch_size": 7}
        config = transformers.Idefics3Config(
            vision_config=vision,
            text_config=shape,
            image_token_id=image,
            scale_factor=2,
            tie_word_embeddings=False,
        )
    torch.manual_seed(0)
    auto_class(config).from_config(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(
    colour: tuple[int, int, int], size: tuple[int, int] = (48, 32), kind: str = "PNG"
) -> bytes:
    """An image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def opened(body: bytes) -> Image.Image:
    """An image's pixels."""
    return Image.open(io.BytesIO(body)).convert("RGB")
