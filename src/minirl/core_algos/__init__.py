"""The formulas of one training step, as pure functions: tensors and keyword-only numbers in, tensors out.

advantage/ (station advantage), policy_loss/ + agg_loss + value_loss (stations update_actor, update_critic),
kl, rollout_correction, distillation, pf_ppo, logprob. Letters: B trajectories, R response length, V
vocabulary, G rows of one prompt; m response_mask, ρ importance ratio, A advantage, S_i = Σ_t r_it the score
of a row.
verl: verl.trainer.ppo.core_algos
"""
