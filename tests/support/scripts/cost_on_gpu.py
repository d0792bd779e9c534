"""Captures a small network on a GPU and measures its operators; prints what a test wants to see, as JSON."""

import dataclasses
import json
import sys

import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture import cost, cost_store, data_sheet
from monetrun.capture.meter import meter_for
from monetrun.ops import device_errors
from monetrun.runtime.backend import Backend
from support.captured import Chooser


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.depthwise, self.linear = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Linear(16, 10)
        self.table = nn.Embedding(100, 16)

    def forward(self, x, rows):
        x = F.relu(self.norm(self.convolution(x)))
        x = F.dropout(self.depthwise(x), 0.1)
        return F.cross_entropy(self.linear(x.mean((2, 3)) + self.table(rows)), rows % 10)


device = torch.device("cuda", 0)
net, chooser = Net().to(device), Chooser()
x, rows = torch.randn(8, 3, 32, 32, device=device), torch.zeros(8, dtype=torch.long, device=device)
torch.compile(net, backend=Backend(chooser, "net"))(x, rows)
joint = chooser.joint
held = torch.cuda.memory_allocated(device)
try:
    known = cost_store.measure([joint], {}, meter_for(device), device, None)
except RuntimeError as error:
    print(json.dumps({"error": str(error), "sticky": device_errors.is_sticky(error)}))
    sys.exit()
called = {str(call.target): signature for signature, (call, _) in joint.timed.items()}
print(
    json.dumps(
        {
            "targets": [str(node.target) for node in joint.nodes],
            "seconds": {target: known[signature].seconds for target, signature in called.items()},
            "measured": {target: known[signature].measured for target, signature in called.items()},
            "exact": {
                f"{op.target} as {i.name}": i.exact
                for op in joint.graph.operators
                for i in op.implementations
                if i.name != "default"
            },
            "requests": {target: dataclasses.astuple(known[s].requests) for target, s in called.items()},
            "still_held": torch.cuda.memory_allocated(device) - held,
            "reserved": torch.cuda.memory_reserved(device),
            "roofline": data_sheet.present(device).flops_per_second["fp32"],
            "estimate": cost.estimate(*joint.timed[called["aten.relu.default"]], data_sheet.present(device)).seconds,
        }
    )
)
