"""From a step's scored groups to an optimizer step.

groups of samples, scored                       data/, rollouts/, rewards/
  batch.py       rewards shaped, samples chosen and weighted, minibatches split
  advantages.py  rewards of a group -> advantages
  distillation.py  a teacher's log-probabilities -> advantages of tokens
  losses.py      PPO, GSPO, CISPO, KL, importance correction (pure functions on [T]); ratios.py: ratios stay finite
  score_centering.py  the sampler's mean of a token's gradient, which is taken out of it
  sums.py        what is measured of a row's tokens: mismatch, by age and by server
  rows.py        PackedSample -> PackedRow, on the host; microbatch.py: PackedRow -> Microbatch, on the device
  packing.py     samples -> rows of equal cost on every rank; assignment.py: which row gets which
  kl_reward.py   with `kl_placement = "reward"`: advantages of rewards less the KL
  teacher_loss.py  with `[distill] top_k`: the divergence from a teacher's tokens
  gradients.py   forward and backward over a step's rows
  finite.py      steps without a finite gradient are left out
  sft.py         loss and step of supervised fine-tuning, on the same rows; the warm start
"""
