"""The demonstration: a small GPT trained twice, once undisturbed and once with processes killed under it.

``text`` is what is trained on, ``gpt`` what is trained, ``job`` the training script as a user would write it;
``run`` starts it twice and compares, ``plot`` draws.
"""
