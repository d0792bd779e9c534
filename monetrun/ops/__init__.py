"""How operators may run other than as eager runs them: one file per family."""
