"""The demo: a burst of long prompts against a pinned and a tuned deployment of the same model.

Read it in this order: traffic (what arrives when), prompts (the words), client (sends it and keeps
account), outcomes (what an account is), watch (what the cluster says meanwhile), view, summary and hints
(how it is shown), steps (the order of everything).
"""
