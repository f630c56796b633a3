"""Random conversation trees through the gateway by the real clients, compared with what the engine knows.

``engine`` answers and keeps what it was asked and what it gave; ``clients`` are OpenAI's, Anthropic's and LiteLLM's;
``agents`` draw a tree and hold its conversations; ``oracle`` reads every format that is stored of it and compares.
"""
