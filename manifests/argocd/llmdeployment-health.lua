-- Health of an LLMDeployment for Argo CD: resource.customizations.health.plimsoll.dev_LLMDeployment.
-- A failure that may heal by itself (a pod that starts again) is Progressing with the cause in the
-- message, as for a Deployment. Degraded is what waits for somebody: Stalled, the deadline of a
-- rollout, an operator that cannot reconcile.

local function find(conditions, kind)
  for _, condition in ipairs(conditions) do
    if condition.type == kind then
      return condition
    end
  end
  return { status = "Unknown", reason = "", message = kind .. " is not known yet" }
end

local status = obj.status
if status == nil or status.conditions == nil then
  return { status = "Progressing", message = "waiting for the operator" }
end
-- The conditions are about an older spec.
if status.observedGeneration ~= obj.metadata.generation then
  return { status = "Progressing", message = "waiting for the operator to see this generation" }
end

local stalled = find(status.conditions, "Stalled")
if stalled.status == "True" then
  return { status = "Degraded", message = stalled.reason .. ": " .. stalled.message }
end
local ready = find(status.conditions, "Ready")
if ready.status == "True" then
  return { status = "Healthy", message = ready.message }
end
if ready.reason == "ScaledToZero" then
  return { status = "Suspended", message = ready.message }
end
local progressing = find(status.conditions, "Progressing")
if progressing.status == "False" then
  return { status = "Degraded", message = progressing.message }
end
local degraded = find(status.conditions, "Degraded")
if degraded.status == "True" and degraded.reason == "ReconcileFailed" then
  return { status = "Degraded", message = degraded.message }
end
return { status = "Progressing", message = ready.message }
