"""Buffers and events that are made once and used for ever."""
