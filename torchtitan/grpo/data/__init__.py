"""From a dataset to prompts in a fixed order.

load.py        all prompts of a configuration: to train on, and the held-out sets
  mixture.py   several sources as one, interleaved by weights
  held_out.py  HeldOut, HeldOutAnswers: one set, and the answers to it
overview.py    counts of rows and the first prompt, for the log and `--check`
rows.py        rows of a source (the room sources/), and which of them are held out
prompts.py     PromptSource: renders rows, skips long ones, shuffles by the seed,
               resumes exactly; asks the curriculum; supervised pairs
  curricula.py ready-made hooks for `[data] curriculum`
conversations.py ConversationSource: rows to learn from, for supervised fine-tuning
  chat.py      which tokens of a rendered conversation the assistant says
routes.py      RouteShape: which experts computed a token, checked, and as text
kept_tokens.py KeptTokens: what could be drawn in place of a token, checked
top_tokens.py  the likeliest tokens at each position, as servers send them, checked
group_arrays.py  groups of samples as arrays, and a group as bytes
  array_bytes.py arrays as bytes
tokenizer.py   the model's tokenizer, its end tokens, and ids without an embedding
samples.py     Prompt, Sample, Group and Conversation, which every other room uses
"""
