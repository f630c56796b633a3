"""Random conversation trees through the gateway by the real clients, compared with what the engine knows.

``engine`` answers and keeps its requests and answers; ``clients`` are OpenAI's, Anthropic's and LiteLLM's; ``agents``
generate a tree and hold its conversations; ``oracle`` reads every stored format and compares.
"""
