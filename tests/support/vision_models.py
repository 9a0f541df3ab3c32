"""Small random models that read images, with their processors, and images for them."""

import copy
import io
import json
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from langchain_art_server.backends.models.base_weights import auto_class
from langchain_art_server.backends.models.images import without_videos
from tests.support.families import QWEN_VISION, SLIDING, VISION
from tests.support.tiny_models import DELTA, SMALL, tokenizer

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
#: Those of the Qwen families, whose images have positions of three dimensions.
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1]}
#: Name -> configuration class, processor, patch size, what the text model has beside `SMALL`, and
#: the vision model.
QWENS: dict[str, tuple[str, str, int, dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-VL": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLProcessor",
        14,
        {},
        {"fullatt_block_indexes": [1], "window_size": 56},
    ),
    "Qwen3-VL": ("Qwen3VLConfig", "Qwen3VLProcessor", 16, {}, {"deepstack_visual_indexes": [0, 1]}),
    "Qwen3.5": ("Qwen3_5Config", "Qwen3VLProcessor", 16, DELTA, {}),
}
#: The tokens of an image attend to each other: Gemma 3, whose images are longer than its window.
GEMMA = "Gemma 3"
VISION_FAMILIES = ("LLaVA", "SmolVLM", *QWENS, GEMMA)


def save_vision_model(folder: Path, family: str = "LLaVA", **text: Any) -> Path:
    """Write a random model of a family, the same every time; `text` changes its text model."""
    if family in QWENS:
        return _save_qwen(folder, family, text)
    if family == GEMMA:
        return _save_gemma(folder, text)
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
    weights = load_file(file := folder / "model.safetensors")
    # As published; transformers reads either name, vLLM this one.
    named = {
        k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in weights.items()
    }
    save_file(named, file, metadata={"format": "pt"})
    processor.save_pretrained(folder)
    return folder


def _save_qwen(folder: Path, family: str, text: dict[str, Any]) -> Path:
    config_class, processor_class, patch, shape, vision = QWENS[family]
    known = copy.deepcopy(tokenizer())
    known.add_special_tokens({"additional_special_tokens": list(_QWEN_TOKENS)})
    start, end, image, video = known.convert_tokens_to_ids(list(_QWEN_TOKENS))
    known.chat_template = TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    config = getattr(transformers, config_class)(
        text_config=SMALL | {"rope_parameters": _MROPE} | shape | text,
        vision_config=QWEN_VISION | {"patch_size": patch, "initializer_range": 0.15} | vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    area = (2 * patch) ** 2
    with without_videos():
        processor = getattr(transformers, processor_class)(
            image_processor=transformers.Qwen2VLImageProcessorPil(
                patch_size=patch, size={"shortest_edge": 4 * area, "longest_edge": 8 * area}
            ),
            tokenizer=known,
        )
        processor.save_pretrained(folder)
    # As in published folders; what reads it needs torchvision.
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps({"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": patch})
    )
    torch.manual_seed(0)
    auto_class(config).from_config(config).save_pretrained(folder)
    return folder


def _save_gemma(folder: Path, text: dict[str, Any]) -> Path:
    known = copy.deepcopy(tokenizer())
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    # vLLM asks for the ids of line breaks, too.
    breaks = ["\n" * count for count in (1, 2, 3, 4)]
    known.add_special_tokens({"additional_special_tokens": [*names.values(), *breaks]})
    known._set_model_specific_special_tokens(names)
    known.init_kwargs["extra_special_tokens"] = names
    known.chat_template = TEMPLATE.replace("<image>", names["boi_token"])
    size, tokens = 56, 16
    config = transformers.Gemma3Config(
        text_config=SMALL | {"query_pre_attn_scalar": 8, **SLIDING, "sliding_window": 10} | text,
        vision_config=VISION | {"image_size": size, "initializer_range": 0.15},
        mm_tokens_per_image=tokens,
        boi_token_index=known.convert_tokens_to_ids(names["boi_token"]),
        eoi_token_index=known.convert_tokens_to_ids(names["eoi_token"]),
        image_token_index=known.convert_tokens_to_ids(names["image_token"]),
        tie_word_embeddings=False,
    )
    transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessorPil(size={"height": size, "width": size}),
        tokenizer=known,
        image_seq_length=tokens,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    model: Any = auto_class(config).from_config(config)
    # Made as zeros, by which an image would be nothing.
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def picture(colour: tuple[int, ...], size: tuple[int, int] = (48, 32), kind: str = "PNG") -> bytes:
    """An image of one colour; a fourth number is how opaque it is."""
    file = io.BytesIO()
    Image.new("RGB" if len(colour) == 3 else "RGBA", size, colour).save(file, kind)
    return file.getvalue()


def opened(body: bytes) -> Image.Image:
    """An image's pixels."""
    return Image.open(io.BytesIO(body)).convert("RGB")
