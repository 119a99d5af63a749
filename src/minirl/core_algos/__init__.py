"""The formulas of one training step, as pure functions: tensors and keyword-only numbers in, tensors out.

In the order of a step: advantage/ (was this answer better than expected?), policy_loss/ (which way to push
each token, and how far?), agg_loss (one loss per token becomes one number), value_loss (the critic). Used by
all: masked, groups, ratio, logprob. Switched on when wanted: kl, rollout_correction, distillation, pf_ppo.

Letters: B trajectories, R response length, V vocabulary, G rows of one prompt, P prompt length. For row i and
token t: m_it response_mask, r_it token_level_rewards, S_i = Σ_t r_it the score of the row, L_i = Σ_t m_it its
length, A_it advantage, G_t return, V_t value; μ_g, σ_g mean and spread of the scores of one prompt. π the
policy, ρ = π/π_old the importance ratio, ε_low and ε_high the clip range (plain ε: a small constant against
division by zero), β a KL coefficient, ℓ a loss per token, sg(x) the value of x as a constant to autograd.

"Cost: N passes over [B, R]": N tensor operations of that size, without the gradient. All of them together are
small beside one forward pass of the model. tests/core_algos/test_cost.py counts them.
verl: verl.trainer.ppo.core_algos
"""
