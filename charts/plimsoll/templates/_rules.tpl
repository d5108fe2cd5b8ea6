{{/* What the operator does in a namespace, and nothing else. Server-side apply needs create and patch. */}}
{{- define "plimsoll.rules" -}}
# The user's objects: read, never written but for their status.
- apiGroups: [plimsoll.dev]
  resources: [llmdeployments]
  verbs: [get, list, watch]
- apiGroups: [plimsoll.dev]
  resources: [llmdeployments/status]
  verbs: [patch]
# Where owner references are guarded, children may only block the deletion of what may be finalized.
- apiGroups: [plimsoll.dev]
  resources: [llmdeployments/finalizers]
  verbs: [update]
# What was learned.
- apiGroups: [plimsoll.dev]
  resources: [memoryprofiles]
  verbs: [get, create, patch]
- apiGroups: [plimsoll.dev]
  resources: [memoryprofiles/status]
  verbs: [patch]
# The children of an LLMDeployment.
- apiGroups: [""]
  resources: [services, configmaps, secrets]
  verbs: [get, create, patch, delete]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch, delete]
# Engine pods are made by the StatefulSet; a broken one is deleted to be made anew.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}
