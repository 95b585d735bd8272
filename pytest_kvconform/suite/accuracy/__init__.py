"""Cases on two OpenAI-compatible servers behind a router: gsm8k, paired with the same servers alone.

Each case judges an observation of the serving bench; none starts a server itself.
"""
