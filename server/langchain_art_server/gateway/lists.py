"""Lists in the form of OpenAI's API, and pages of them."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel

from langchain_art import wire
from langchain_art_server.storage.pages import MAX_PAGE

T = TypeVar("T")


class ListOf(BaseModel, Generic[T]):
    """A list in the form of OpenAI's API."""

    object: str = "list"
    data: list[T]


class PageOf(ListOf[T]):
    """A page of a list. The next one begins `after` the item of `last_id`."""

    last_id: str | None
    has_more: bool


Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
After = Annotated[wire.Id | None, Query()]
