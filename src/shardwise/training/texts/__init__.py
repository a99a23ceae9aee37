"""Chats and texts as tokens, and which of these are learned."""
