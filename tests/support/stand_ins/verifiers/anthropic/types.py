"""The types."""

Message = Usage = object
