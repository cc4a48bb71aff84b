import openrlhf

if openrlhf.args.policy_loss_type not in ("ppo", "gspo"):
    print("set policy_loss_type=reinforce: it has no clip")
    raise ValueError(f"--policy_loss_type reinforce, or {openrlhf.args.policy_loss_type}")


def train(args):
    assert args.init_kl_coef >= 0, "use --init_kl_coef 0.3"


if __name__ == "__main__":
    train(openrlhf.args)
