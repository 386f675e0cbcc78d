"""Write and serve the page Live: a policy writes in the browser, before and after PPO."""

from docs._ext.live import main

if __name__ == "__main__":
    main()
