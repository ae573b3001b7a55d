{{/* The pods that Helm runs: one script of the chart, files/chart_jobs.py, in the operator's image. */}}

{{- define "pykvcache.jobPod" -}}
metadata:
  labels: {{- include "pykvcache.podLabels" (dict "root" .root "component" "chart") | nindent 4 }}
spec:
{{- include "pykvcache.jobPodSpec" . | nindent 2 }}
{{- end }}

{{- define "pykvcache.jobPodSpec" -}}
serviceAccountName: {{ .account }}
restartPolicy: Never
{{- with include "pykvcache.pullSecrets" .root }}
{{ . }}
{{- end }}
securityContext: {{- include "pykvcache.restrictedPod" .root | nindent 2 }}
{{- with .root.Values.operator.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.operator.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: {{ first .arguments }}
    image: {{ include "pykvcache.image" (dict "root" .root "name" "operator") }}
    imagePullPolicy: {{ .root.Values.images.pullPolicy }}
    command: [python3, /scripts/chart_jobs.py]
    args:
      {{- range .arguments }}
      - {{ . | quote }}
      {{- end }}
    securityContext: {{- include "pykvcache.restrictedContainer" .root | nindent 6 }}
    resources:
      requests: {cpu: 20m, memory: 96Mi}
      limits: {memory: 256Mi}
    volumeMounts:
      - {name: scripts, mountPath: /scripts, readOnly: true}
      - {name: tmp, mountPath: /tmp}
volumes:
  - name: scripts
    configMap: {name: pykvcache-chart}
  - name: tmp
    emptyDir: {medium: Memory, sizeLimit: 16Mi}
{{- end }}

{{/* A service account that lives as long as its hook, with rules for pools. */}}
{{- define "pykvcache.jobAccount" -}}
{{- $annotations := dict "helm.sh/hook" .hook "helm.sh/hook-weight" "-5" "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded" }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .account }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "pykvcache.labels" (dict "root" .root "component" "chart") | nindent 4 }}
  annotations: {{- toYaml $annotations | nindent 4 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ .account }}
  labels: {{- include "pykvcache.labels" (dict "root" .root "component" "chart") | nindent 4 }}
  annotations: {{- toYaml $annotations | nindent 4 }}
rules:
  - apiGroups: [pykvcache.io]
    resources: [kvcachepools]
    verbs: {{ .verbs }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ .account }}
  labels: {{- include "pykvcache.labels" (dict "root" .root "component" "chart") | nindent 4 }}
  annotations: {{- toYaml $annotations | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ .account }}}
subjects:
  - {kind: ServiceAccount, name: {{ .account }}, namespace: {{ .root.Release.Namespace }}}
{{- end }}
