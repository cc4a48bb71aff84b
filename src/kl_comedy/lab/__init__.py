"""What train, sweep and results never use: audits of gradients, planning, other systems' flags."""
